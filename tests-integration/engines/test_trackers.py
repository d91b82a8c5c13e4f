"""Each tracker with its real engine, offline, on two ranks: `hatch run engines:trackers`.

What is logged is read back from the engine's own files, by the engine's own reader where it has one.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_state.errors import MissingDependencyError
from accel_train import LOGGER_TYPE_TO_CLASS, Accelerator, OptionError
from testkit import worlds

CONFIG = {"lr": 0.1, "layers": [1, 2], "opt": {"name": "sgd"}, "seed": None, "path": Path("a/b")}
COLUMNS, ROWS = ["label", "score"], [["cat", 0.5], ["dog", 0.25]]
COLORED = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
GREY = np.random.default_rng(1).integers(0, 256, (8, 6), dtype=np.uint8)


def log_everything(name: str, folder: str, init_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Log as a script does: the same calls on every rank, with values of its own on each."""
    os.chdir(folder)
    accelerator = Accelerator(log_with=name, project_dir=folder)
    rank = accelerator.process_index
    if rank == 0:  # scripts start trackers there, or everywhere
        accelerator.init_trackers(
            "proj", CONFIG, {name: init_kwargs} if init_kwargs else None, on_failure="raise"
        )
    accelerator.log({"loss": torch.tensor(0.5) + rank, "eval_acc": np.float32(0.25), "note": "hello"}, step=1)
    accelerator.log({"loss": 0.375 + rank, "group": {"a": 1, "b": 2.0}}, step=2)
    colored = torch.from_numpy(COLORED).permute(2, 0, 1)
    accelerator.log_images({"colored": colored, "several": [GREY, (COLORED, "a caption")]}, step=2)
    accelerator.log_table("table", columns=COLUMNS, data=ROWS, step=2)
    engine = accelerator.get_tracker(name, unwrap=True)
    facts = {"rank": rank, "running": [tracker.name for tracker in accelerator.trackers]}
    if name == "clearml":
        facts["folder"] = str(engine.get_offline_mode_folder())
    if name == "mlflow":
        facts["run"] = engine.info.run_id
    if name == "trackio":
        facts["run"] = engine.name
    accelerator.end_training()
    return facts


def run(name: str, folder: Path, init_kwargs: dict[str, Any] | None = None, **environ: str) -> dict[str, Any]:
    """Log on two ranks, with a home folder of their own; what rank 0 says."""
    pytest.importorskip(
        {"tensorboard": "tensorboard"}.get(name, name), reason="hatch run engines:trackers installs it"
    )
    home = folder / "home"
    home.mkdir()
    facts, other = worlds.run(
        log_everything,
        2,
        name,
        str(folder),
        init_kwargs,
        timeout=240,
        environ={"HOME": str(home), "MPLCONFIGDIR": str(home), **environ},
    )
    assert facts["running"] == [name]
    assert other["running"] == []
    return facts


def pixels(file: Any) -> np.ndarray[Any, Any]:
    from PIL import Image

    return np.asarray(Image.open(file))


def one(found: Any) -> Path:
    [path] = found
    return Path(path)


def test_tensorboard(tmp_path):
    run("tensorboard", tmp_path)
    import yaml
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(tmp_path / "proj"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.375)]
    assert [(event.step, event.value) for event in events.Scalars("eval_acc")] == [(1, 0.25)]
    [note] = events.Tensors("note/text_summary")
    assert make_ndarray(note.tensor_proto).tolist() == [b"hello"]
    np.testing.assert_array_equal(
        pixels(io.BytesIO(events.Images("colored")[0].encoded_image_string)), COLORED
    )
    np.testing.assert_array_equal(
        pixels(io.BytesIO(events.Images("several/0")[0].encoded_image_string))[:, :, 0], GREY
    )
    [table] = events.Tensors("table/text_summary")
    [text] = make_ndarray(table.tensor_proto).tolist()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.decode().splitlines()]
    assert [rows[0], *rows[2:]] == [COLUMNS, ["cat", "0.5"], ["dog", "0.25"]]
    for name, value in {"a": 1.0, "b": 2.0}.items():
        of_group = EventAccumulator(str(tmp_path / "proj" / f"group_{name}"))
        of_group.Reload()
        assert [event.value for event in of_group.Scalars("group")] == [value]
    stored = one((tmp_path / "proj").glob("*/hparams.yml"))
    assert yaml.safe_load(stored.read_text()) == {**CONFIG, "path": "a/b"}
    hparams = EventAccumulator(str(stored.parent))
    hparams.Reload()
    content = hparams.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    from tensorboard.plugins.hparams import plugin_data_pb2

    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["lr"].number_value == 0.1
    assert start.hparams["opt/name"].string_value == "sgd"


def test_wandb(tmp_path):
    pytest.importorskip(
        "swanlab", reason="SwanLab reads files of wandb; hatch run engines:trackers installs it"
    )
    run("wandb", tmp_path, {"name": "mine"}, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    project = name = None
    with WBDataStoreReader() as reader:
        file = one((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
        reader.open(file)
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            if record.HasField("run"):
                project, name = record.run.project or project, record.run.display_name or name
            updates = [*record.run.config.update, *record.config.update]
            config.update({item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates})
            if record.HasField("history"):
                row: dict[str, Any] = {}
                for item in record.history.item:
                    row["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
                history.append(row)
    assert (project, name) == ("proj", "mine")
    assert {name: config[name] for name in CONFIG} == {**CONFIG, "path": "a/b"}
    by_step = {row["_step"]: row for row in history}
    assert (by_step[1]["loss"], by_step[1]["eval_acc"], by_step[1]["note"]) == (0.5, 0.25, "hello")
    assert by_step[2]["loss"] == 0.375
    assert (by_step[2]["group/a"], by_step[2]["group/b"]) == (1, 2.0)
    files = file.parent / "files"
    np.testing.assert_array_equal(pixels(files / by_step[2]["colored/filenames"][0]), COLORED)
    np.testing.assert_array_equal(pixels(files / by_step[2]["several/filenames"][0]), GREY)
    assert "a caption" in by_step[2].get("several/captions", by_step[2].get("several/all_captions", []))
    table = json.loads((files / by_step[2]["table/path"]).read_text())
    assert (table["columns"], table["data"]) == (COLUMNS, ROWS)


@pytest.mark.parametrize("store", ["files", "database"])
def test_mlflow(tmp_path, store):
    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "database" else (tmp_path / "mlruns").as_uri()
    environ = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    facts = run("mlflow", tmp_path, {"tags": {"owner": "me"}, "run_name": "mine"}, **environ)
    reading = [tmp_path, facts["run"]]
    environ["HOME"] = str(tmp_path)
    [(params, tags, status, losses, values, images, table)] = worlds.run(
        read_mlflow, 1, *reading, environ=environ, timeout=120
    )
    assert params == {"lr": "0.1", "layers": "[1, 2]", "opt/name": "sgd", "seed": "None", "path": "a/b"}
    assert (tags["owner"], tags["mlflow.runName"], status) == ("me", "mine", "FINISHED")
    assert losses == [(1, 0.5), (2, 0.375)]
    assert (values["eval_acc"], values["group/a"], values["group/b"]) == (0.25, 1.0, 2.0)
    assert "note" not in values
    assert len(images) == 3
    assert any(np.array_equal(image, COLORED) for image in images)
    assert table == {"label": ["cat", "dog"], "score": [0.5, 0.25]}


def read_mlflow(folder: Path, run_id: str) -> tuple[Any, ...]:
    import mlflow

    client = mlflow.MlflowClient()
    found = client.get_run(run_id)
    assert client.get_experiment(found.info.experiment_id).name == "proj"
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "loss")]
    images = Path(client.download_artifacts(run_id, "images"))
    mlflow.set_experiment("proj")
    table = mlflow.load_table("table/2.json", run_ids=[run_id])
    return (
        found.data.params,
        found.data.tags,
        found.info.status,
        losses,
        found.data.metrics,
        [pixels(path) for path in images.glob("*.png")],
        table.to_dict(orient="list"),
    )


def test_comet(tmp_path):
    run("comet_ml", tmp_path, {"online": False}, COMET_OFFLINE_DIRECTORY=str(tmp_path / "comet"))
    with zipfile.ZipFile(one((tmp_path / "comet").glob("*.zip"))) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        experiment = json.loads(archive.read("experiment.json"))
        uploads = {
            item["payload"]["additional_params"].get("figName")
            or item["payload"]["additional_params"]["fileName"]: (
                archive.read(item["payload"]["file_path"]),
                item["payload"].get("metadata"),
            )
            for item in messages
            if item["type"] == "file_upload"
        }
    assert experiment["project_name"] == "proj"
    metrics = [item["payload"]["metric"] for item in messages if item["type"] == "metric_msg"]
    assert {(metric["metricName"], metric["step"], metric["metricValue"]) for metric in metrics} >= {
        ("loss", 1, 0.5),
        ("loss", 2, 0.375),
        ("eval_acc", 1, 0.25),
        ("group_a", 2, 1),
        ("group_b", 2, 2.0),
    }
    payloads = [item["payload"] for item in messages if item["type"] == "parameter_msg"]
    given = [payload.get("param") or payload["params"] for payload in payloads]
    parameters = {parameter["paramName"]: parameter["paramValue"] for parameter in given}
    assert (parameters["lr"], parameters["opt|name"], parameters["path"]) == (0.1, "sgd", "a/b")
    others = {
        item["payload"]["key"]: item["payload"]["value"] for item in messages if item["type"] == "log_other"
    }
    assert others["note"] == "hello"
    np.testing.assert_array_equal(pixels(io.BytesIO(uploads["colored"][0])), COLORED)
    np.testing.assert_array_equal(pixels(io.BytesIO(uploads["several/0"][0]))[:, :, 0], GREY)
    np.testing.assert_array_equal(pixels(io.BytesIO(uploads["several/1"][0])), COLORED)
    assert uploads["several/1"][1] == {"caption": "a caption"}
    read = list(csv.reader(io.StringIO(uploads["table.csv"][0].decode())))
    assert read == [COLUMNS, ["cat", "0.5"], ["dog", "0.25"]]


def test_aim(tmp_path):
    run("aim", tmp_path)
    [(name, params, metrics, note, (step, image), captions)] = worlds.run(
        read_aim, 1, str(tmp_path), environ={"HOME": str(tmp_path)}, timeout=120
    )
    assert (name, params) == ("proj", {**CONFIG, "path": "a/b"})
    assert metrics == {
        "loss": [(1, 0.5), (2, 0.375)],
        "eval_acc": [(1, 0.25)],
        "group/a": [(2, 1.0)],
        "group/b": [(2, 2.0)],
    }
    assert note == [(1, "hello")]
    assert step == 2
    np.testing.assert_array_equal(image, COLORED)
    assert captions == ["", "a caption"]


def read_aim(folder: str) -> tuple[Any, ...]:
    import aim
    from aim.sdk.index_manager import RepoIndexManager
    from aim.storage.context import Context

    repository = aim.Repo(folder)
    [identifier] = repository.list_all_runs()
    RepoIndexManager.get_index_manager(repository).index(
        identifier
    )  # what `aim up` does before it shows a run
    found = aim.Repo(folder).get_run(identifier)
    everywhere = Context({})
    metrics = {
        metric.name: [(step, value) for step, (value, *_) in metric.data.items()]
        for metric in found.metrics()
        if not metric.name.startswith("__system__")
    }
    note = [
        (step, text.data) for step, (text, *_) in found.get_text_sequence("note", everywhere).data.items()
    ]
    colored = found.get_image_sequence("colored", everywhere)
    [(step, (image, *_))] = colored.data.items()
    [(_, (several, *_))] = found.get_image_sequence("several", everywhere).data.items()
    return (
        found.name,
        found["hparams"],
        metrics,
        note,
        (step, np.asarray(image.to_pil_image())),
        [one.caption for one in several],
    )


def test_clearml(tmp_path):
    facts = run("clearml", tmp_path, CLEARML_OFFLINE_MODE="1")
    with zipfile.ZipFile(facts["folder"] + ".zip") as archive:
        task = json.loads(archive.read("task.json"))
        lines = archive.read("metrics.jsonl").decode().splitlines()
        console = archive.read("log.jsonl").decode()
        names = [name for name in archive.namelist() if "/metrics/colored/" in name]
        image = pixels(io.BytesIO(archive.read(one(names).as_posix())))
    assert (task["project_name"], task["name"]) == ("proj", "proj")
    stored = task["configuration"]["General"]["value"]
    assert "lr = 0.1" in stored
    assert 'name = "sgd"' in stored
    assert "note: hello" in console
    metrics = [metric for line in lines for metric in json.loads(line)]
    scalars = {
        (metric["metric"], metric["variant"], metric["iter"], metric["value"])
        for metric in metrics
        if metric["type"] == "training_stats_scalar" and not metric["metric"].startswith(":")
    }
    assert scalars >= {
        ("loss", "train", 1, 0.5),
        ("loss", "train", 2, 0.375),
        ("acc", "eval", 1, 0.25),
        ("group/a", "train", 2, 1.0),
    }
    assert image.shape == COLORED.shape  # ClearML writes JPEG
    plots = [json.loads(metric["plot_str"]) for metric in metrics if metric["type"] == "plot"]
    [table] = plots[0]["data"]
    assert table["header"]["values"] == COLUMNS
    assert table["cells"]["values"] == [["cat", "dog"], [0.5, 0.25]]


def test_dvclive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # even to read, DVCLive makes a DVC repository of the Git repository around
    run("dvclive", tmp_path, {"save_dvc_exp": False, "dvcyaml": False, "dir": str(tmp_path / "live")})
    import dvclive
    from dvclive.utils import parse_metrics
    from ruamel.yaml import YAML

    live = dvclive.Live(str(tmp_path / "live"), resume=True, save_dvc_exp=False, dvcyaml=False)
    history, latest = parse_metrics(live)
    read = {Path(path).stem: rows for path, rows in history.items()}
    assert [(row["step"], row["loss"]) for row in read["loss"]] == [("1", "0.5"), ("2", "0.375")]
    assert latest["group"] == {"a": 1, "b": 2.0}
    assert YAML(typ="safe").load((tmp_path / "live" / "params.yaml").read_text()) == {**CONFIG, "path": "a/b"}
    images = tmp_path / "live" / "plots" / "images"
    np.testing.assert_array_equal(pixels(images / "colored.png"), COLORED)
    np.testing.assert_array_equal(pixels(images / "several" / "0.png"), GREY)


def test_swanlab(tmp_path):
    run("swanlab", tmp_path, {"mode": "offline", "log_dir": str(tmp_path / "logs")})
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    file = one((tmp_path / "logs").glob("*/*.swanlab"))
    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(data) for data in reader]
    assert [record.start.project for record in records if record.HasField("start")] == ["proj"]
    scalars = [
        (item.scalar.key, item.scalar.step, item.scalar.value.number)
        for item in records
        if item.HasField("scalar")
    ]
    assert set(scalars) >= {
        ("loss", 1, 0.5),
        ("loss", 2, 0.375),
        ("eval_acc", 1, 0.25),
        ("group/a", 2, 1.0),
        ("group/b", 2, 2.0),
    }
    media = {item.media.key: item.media for item in records if item.HasField("media")}
    folder = file.parent / "media"
    [text] = media["note"].value.items
    assert (folder / "text" / text.filename).read_text() == "hello"
    [image] = media["colored"].value.items
    np.testing.assert_array_equal(pixels(folder / "image" / image.filename), COLORED)
    assert [item.caption for item in media["several"].value.items] == ["", "a caption"]
    [table] = media["table"].value.items
    assert "cat" in (folder / "echarts" / table.filename).read_text()
    config = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
    assert config["lr"]["value"] == 0.1
    assert config["opt"]["value"] == {"name": "sgd"}


def test_trackio(tmp_path):
    environ = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    facts = run("trackio", tmp_path, **{**environ, "HOME": str(tmp_path)})
    [(logs, config)] = worlds.run(read_trackio, 1, facts["run"], environ=environ, timeout=120)
    by_name: dict[str, list[tuple[int, Any]]] = {}
    for row in logs:
        for name, value in row.items():
            by_name.setdefault(name, []).append((row["step"], value))
    assert by_name["loss"] == [(1, 0.5), (2, 0.375)]
    assert by_name["eval_acc"] == [(1, 0.25)]
    assert by_name["note"] == [(1, "hello")]
    assert by_name["group"] == [(2, {"a": 1, "b": 2.0})]
    [(_, image)] = by_name["colored"]
    np.testing.assert_array_equal(
        pixels(tmp_path / "trackio" / "media" / image["file_path"])[:, :, :3], COLORED
    )
    [(_, captioned)] = by_name["several/1"]
    assert captioned["caption"] == "a caption"
    [(_, table)] = by_name["table"]
    assert table["_value"] == [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    assert {name: config[name] for name in CONFIG} == {**CONFIG, "path": "a/b"}


def read_trackio(name: str) -> tuple[Any, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("proj", name), SQLiteStorage.get_run_config("proj", name)


# Beside Accelerate


def log_to_tensorboard(package: str, folder: str) -> None:
    """What a script of Accelerate does, on either."""
    import importlib

    os.chdir(folder)
    accelerator = importlib.import_module(package).Accelerator(
        log_with=["tensorboard", "dvclive"], project_dir=folder, cpu=True
    )
    options = {
        "dvclive": {"save_dvc_exp": False, "dvcyaml": False, "dir": "live"},
        "tensorboard": {"flush_secs": 1},
    }
    accelerator.init_trackers("proj", {"lr": 0.1, "steps": 3, "name": "sgd", "nesterov": True}, options)
    for step in range(3):
        accelerator.log({"loss": 1.0 / (step + 1), "epoch": step, "note": "hello"}, step=step)
    accelerator.end_training()


def test_the_files_are_those_of_accelerate(tmp_path):
    pytest.importorskip("accelerate", reason="hatch run engines:trackers installs it")
    pytest.importorskip("tensorboard", reason="hatch run engines:trackers installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = []
    for package in ("accelerate", "accel_train"):
        folder = tmp_path / package
        folder.mkdir()
        worlds.run(log_to_tensorboard, 1, package, str(folder), environ={"HOME": str(tmp_path)}, timeout=240)
        events = EventAccumulator(str(folder / "proj"))
        events.Reload()
        hparams = one((folder / "proj").glob("*/hparams.yml"))
        live = {path.name: path.read_text().splitlines() for path in (folder / "live").rglob("*.tsv")}
        without_times = {
            name: [line.split("\t")[-2:] if "timestamp" in lines[0] else line for line in lines]
            for name, lines in live.items()
        }
        read.append(
            {
                "scalars": {
                    tag: [(event.step, event.value) for event in events.Scalars(tag)]
                    for tag in ("loss", "epoch")
                },
                "texts": [event.tensor_proto.string_val[:] for event in events.Tensors("note/text_summary")],
                "hparams": sorted(hparams.read_text().splitlines()),
                "live": without_times,
                "latest": json.loads((folder / "live" / "metrics.json").read_text()),
                "params": sorted((folder / "live" / "params.yaml").read_text().splitlines()),
            }
        )
    theirs, ours = read
    assert ours == theirs
    assert ours["scalars"]["epoch"] == [(0, 0.0), (1, 1.0), (2, 2.0)]


# Several in one process, and classes of users


def two_accelerators(name: str, folder: str, init_kwargs: dict[str, Any]) -> list[str]:
    """Two trainings in turn, each with a run of its own."""
    os.chdir(folder)
    one, other = Accelerator(log_with=name), Accelerator(log_with=name)
    for accelerator, value in ((one, 1.0), (other, 2.0)):
        accelerator.init_trackers("proj", {"value": value}, {name: init_kwargs}, on_failure="raise")
    for step in range(2):
        one.log({"loss": 1.0}, step=step)
        other.log({"loss": 2.0}, step=step)
    runs = [accelerator.get_tracker(name, unwrap=True) for accelerator in (one, other)]
    one.end_training()
    other.log({"loss": 3.0}, step=2)
    other.end_training()
    return [run.info.run_id if name == "mlflow" else run.id for run in runs]


def test_two_accelerators_with_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason="hatch run engines:trackers installs it")
    environ = {"HOME": str(tmp_path), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    [runs] = worlds.run(two_accelerators, 1, "mlflow", str(tmp_path), {}, environ=environ, timeout=240)
    [found] = worlds.run(losses_of_mlflow, 1, runs, environ=environ, timeout=120)
    assert found == [("1.0", [1.0, 1.0], "FINISHED"), ("2.0", [2.0, 2.0, 3.0], "FINISHED")]


def losses_of_mlflow(runs: list[str]) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient()
    found = [client.get_run(run) for run in runs]
    return [
        (
            run.data.params["value"],
            [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")],
            run.info.status,
        )
        for run in found
    ]


def test_two_accelerators_with_wandb(tmp_path):
    pytest.importorskip("wandb", reason="hatch run engines:trackers installs it")
    environ = {"HOME": str(tmp_path), "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    arguments = {"reinit": "create_new"}
    [runs] = worlds.run(two_accelerators, 1, "wandb", str(tmp_path), arguments, environ=environ, timeout=240)
    assert len(set(runs)) == 2
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def a_server_that_is_gone(folder: str) -> list[str]:
    """MLflow's server does not answer: training goes on, without anything to wait for."""
    import logging

    os.chdir(folder)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_train").addHandler(handler)
    accelerator = Accelerator(log_with="mlflow")
    accelerator.init_trackers("proj", {"lr": 0.1})
    for step in range(5):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.get_tracker("mlflow", unwrap=True).info.run_id.upper()
    accelerator.end_training()
    return records


def test_a_server_that_is_gone(tmp_path):
    pytest.importorskip("mlflow", reason="hatch run engines:trackers installs it")
    environ = {
        "HOME": str(tmp_path),
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # the port that discards; nothing listens there
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    [records] = worlds.run(a_server_that_is_gone, 1, str(tmp_path), environ=environ, timeout=240)
    assert len(records) == 1, records
    assert "The tracker 'mlflow' failed in start()" in records[0]
    assert "127.0.0.1" in records[0]


# What is refused before anything starts


LOGGED_OUT = {
    "wandb": ("wandb login", {"WANDB_MODE": "online"}),
    "comet_ml": ("comet login", {}),
    "clearml": ("clearml-init", {"CLEARML_OFFLINE_MODE": "0"}),
    "swanlab": ("swanlab login", {"SWANLAB_MODE": "online"}),
}


def start(name: str, folder: str, init_kwargs: dict[str, Any]) -> str:
    os.chdir(folder)
    accelerator = Accelerator(log_with=name, project_dir=folder)
    try:
        accelerator.init_trackers("proj", init_kwargs={name: init_kwargs})
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LOGGED_OUT)
def test_a_tracker_that_is_not_logged_in(tmp_path, name):
    pytest.importorskip(name, reason="hatch run engines:trackers installs it")
    how, environ = LOGGED_OUT[name]
    [message] = worlds.run(
        start, 1, name, str(tmp_path), {}, environ={"HOME": str(tmp_path), **environ}, timeout=120
    )
    assert f"{name!r} is not logged in" in message
    assert how in message
    assert not list(tmp_path.rglob("*run-*"))


@pytest.mark.parametrize("name", [name for name in LOGGER_TYPE_TO_CLASS if name != "mlflow"])
def test_an_argument_that_the_engine_does_not_have(tmp_path, name):
    pytest.importorskip(name, reason="hatch run engines:trackers installs it")
    arguments = {"no_such_argument": 1}
    [message] = worlds.run(
        start, 1, name, str(tmp_path), arguments, environ={"HOME": str(tmp_path)}, timeout=120
    )
    if name == "swanlab":  # its function takes any name
        assert "no_such_argument" not in message
    else:
        assert "'no_such_argument'" in message
        assert name in message


def test_all_are_installed_here():
    missing = {
        name: kind.install_line() for name, kind in LOGGER_TYPE_TO_CLASS.items() if kind.install_line()
    }
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; hatch run engines:trackers installs them")
    with pytest.raises(OptionError, match="needs a folder"):
        Accelerator(log_with="all")
    assert len(Accelerator(log_with="all", project_dir="x").log_with) == len(LOGGER_TYPE_TO_CLASS)


def test_the_extra_of_each_that_is_not_installed():
    import tomllib

    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "packages/accel-train/pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        line = kind.install_line()
        if line is not None:
            assert shlex.split(line.removeprefix("pip install ")) in extras.values()
            with pytest.raises(MissingDependencyError, match="pip install"):
                Accelerator(log_with=name, project_dir="x")
