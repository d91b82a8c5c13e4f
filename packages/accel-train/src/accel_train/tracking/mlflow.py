"""MLflow."""

from __future__ import annotations

import json
from typing import Any

from accel_state import environment
from accel_state.host.available import is_mlflow_available
from accel_state.log import get_logger
from accel_train.errors import OptionError
from accel_train.tracking.base import on_main_process
from accel_train.tracking.engines import Images, StoresTables, one_by_one, say_left_out
from accel_train.tracking.tables import LoggedTable
from accel_train.tracking.values import flat, split_numbers

__all__ = ["MLflowTracker"]

_logger = get_logger(__name__)

_PARAMETERS_AT_ONCE = 100
"""MLflow's limit for one request."""


class MLflowTracker(StoresTables):
    """Logs to an MLflow run, at MLflow's tracking URI.

    The run is MLflow's active run, so functions of `mlflow` that a script calls directly log to it too. If another run
    is active already, and this one is not nested in it, it becomes a separate run beside that one.

    Nested names are joined by a slash. Configured values that are too long for MLflow are left out, with a warning. An
    image without a step has the step 0, and several of one name are `name/0`, `name/1`, …. A table is the artifact
    ``<table_name>.json``, or with a step ``<table_name>/<step>.json``.

    Args:
        experiment_name: name of the experiment; `MLFLOW_EXPERIMENT_NAME` has precedence.
        logging_dir: where artifacts of a new experiment are stored.
        run_id: ID of a run to continue; `MLFLOW_RUN_ID` has precedence.
        tags: tags of the run, a mapping or its JSON; `MLFLOW_TAGS` has precedence.
        nested_run: make it a child of the active run; `MLFLOW_NESTED_RUN` has precedence.
        run_name: name of the run.
        description: description of the run.

    Raises:
        OptionError: `tags` is not a mapping.
    """

    name = "mlflow"
    is_installed = staticmethod(is_mlflow_available)
    run_is_in = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        self.experiment_name = environment.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = environment.get("MLFLOW_RUN_ID") or run_id
        self.tags = _read_tags(environment.get("MLFLOW_TAGS") or tags)
        self.nested_run = environment.parse_flag_from_env("MLFLOW_NESTED_RUN", nested_run)
        self.description = description
        self.active_run: Any = None

    def check_ready(self) -> None:
        """The constructor has checked the arguments."""

    def _start(self) -> None:
        import mlflow

        experiment = mlflow.get_experiment_by_name(self.experiment_name) if self.experiment_name else None
        if experiment is not None:
            identifier = experiment.experiment_id
        elif self.experiment_name:
            identifier = mlflow.create_experiment(self.experiment_name, artifact_location=self.logging_dir)
        else:
            identifier = None
        if mlflow.active_run() is None or self.nested_run:
            self.active_run = mlflow.start_run(
                run_id=self.run_id,
                experiment_id=identifier,
                run_name=self.run_name,
                nested=self.nested_run,
                tags=self.tags,
                description=self.description,
            )
            return
        client = mlflow.MlflowClient()
        if self.run_id is not None:
            self.active_run = client.get_run(self.run_id)
            return
        described = {"mlflow.note.content": self.description} if self.description else {}
        self.active_run = client.create_run(
            identifier or "0", run_name=self.run_name, tags={**(self.tags or {}), **described}
        )

    def _store(self, values: dict[str, Any]) -> None:
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        kept = {}
        for name, value in flat(values).items():
            if len(str(value)) <= MAX_PARAM_VAL_LENGTH:
                kept[name] = value
                continue
            _logger.warning(
                "The tracker 'mlflow' left out %r of the configuration: it has %d characters, and MLflow stores at "
                "most %d.",
                name,
                len(str(value)),
                MAX_PARAM_VAL_LENGTH,
                main_process_only=False,
            )
        items = list(kept.items())
        for begin in range(0, len(items), _PARAMETERS_AT_ONCE):
            mlflow.log_params(dict(items[begin : begin + _PARAMETERS_AT_ONCE]), run_id=self._id)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        import mlflow

        numbers, others = split_numbers(values)
        mlflow.log_metrics(numbers, step=step, run_id=self._id, **kwargs)
        say_left_out(self.name, others, "numbers")

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        import mlflow

        client = mlflow.MlflowClient()
        for key, image in one_by_one(images):
            client.log_image(self._id, image.pixels, key=key, step=step or 0, synchronous=True, **kwargs)

    def _table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        import mlflow

        file = f"{name}.json" if step is None else f"{name}/{step}.json"
        mlflow.log_table(table.by_column(), file, run_id=self._id, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly as an artifact.

        Args:
            figure: the figure.
            artifact_file: path among the artifacts.
            save_kwargs: for `MlflowClient.log_figure`.
        """
        import mlflow

        mlflow.MlflowClient().log_figure(self._id, figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files of a folder as artifacts.

        Args:
            local_dir: the folder.
            artifact_path: path among the artifacts.
        """
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path, run_id=self._id)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file as an artifact.

        Args:
            local_path: the file.
            artifact_path: path among the artifacts.
        """
        import mlflow

        mlflow.log_artifact(local_path, artifact_path, run_id=self._id)

    def _finish(self) -> None:
        import mlflow

        active = mlflow.active_run()
        if active is not None and active.info.run_id == self._id:
            mlflow.end_run()
        else:
            mlflow.MlflowClient().set_terminated(self._id)

    @property
    def _id(self) -> str:
        identifier: str = self.active_run.info.run_id
        return identifier


def _read_tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    read = tags
    if isinstance(tags, str):
        try:
            read = json.loads(tags)
        except json.JSONDecodeError:
            read = tags
    if read is not None and not isinstance(read, dict):
        raise OptionError(
            f"The tags of MLflow are {tags!r:.80}; expected a dictionary, or MLFLOW_TAGS with one in JSON: "
            '\'{"owner": "me"}\'.'
        )
    return read
