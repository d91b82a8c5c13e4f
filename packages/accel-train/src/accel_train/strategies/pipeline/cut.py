"""Which modules of a model make which stage of a pipeline."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from accel_ckpt.modules.names import listed
from accel_state.balance import balanced_starts
from accel_train.errors import PrepareError
from accel_train.plugins.parallelism import PipelineParallelConfig
from accel_train.strategies.pipeline.chains import check_chain

__all__ = ["Cut", "cut_model", "takes_embeddings"]

_HOW = (
    "Name the modules that hold its parameters, in the order in which its forward calls them: "
    "ParallelismConfig(pp_handler=PipelineParallelConfig(modules=[…]))."
)


@dataclass(frozen=True)
class Cut:
    """How a model is cut.

    Attributes:
        stages: for each stage the names of its modules, in the order in which they are called.
        chain: each module is called with what the one before returned, and the model does nothing else. False: the
            model's own forward is called, in which modules of other stages do nothing.
        layers: names of the modules through which activations pass one by one: the items of lists, if there are any.
    """

    stages: tuple[tuple[str, ...], ...]
    chain: bool
    layers: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """All modules, in order."""
        return tuple(name for stage in self.stages for name in stage)


def takes_embeddings(model: nn.Module) -> bool:
    """Whether a model takes `inputs_embeds` in the place of tokens, as those of transformers."""
    return hasattr(model, "get_input_embeddings") and hasattr(model, "config")


def cut_model(model: nn.Module, config: PipelineParallelConfig, count: int) -> Cut:
    """Decide which modules make which stage; changes nothing.

    Args:
        model: the whole model.
        config: may name its modules, and those with which stages begin.
        count: number of stages.

    Raises:
        PrepareError: the model's modules or their order are not known, a name is unknown, its forward does more than
            call them, a stage would be empty, or two stages would share a parameter.
    """
    chain = not takes_embeddings(model)
    names, blocks = _modules_in_order(model, config)
    _check_complete(model, names)
    if chain:
        check_chain(model, names)
    if config.cuts is None:
        stages = _balanced(model, names, blocks, count)
    else:
        stages = _at(names, config.cuts, count, type(model).__name__)
    if not chain:
        for number, stage in enumerate(stages):
            if not set(stage) & blocks:
                raise PrepareError(
                    f"Stage {number} of the pipeline would be {', '.join(stage)}, without any of the "
                    f"{len(blocks)} layers of {type(model).__name__}. Cut it elsewhere (PipelineParallelConfig(cuts="
                    "[…])), so that each stage has a layer."
                )
    _check_ties(model, stages)
    return Cut(stages, chain, frozenset(blocks))


def _modules_in_order(model: nn.Module, config: PipelineParallelConfig) -> tuple[list[str], set[str]]:
    """The names of the modules, in the order of the forward, and those that are items of lists: the layers."""
    if config.modules is not None:
        given = list(config.modules)
    elif isinstance(model, nn.Sequential):
        given = list(model._modules)
    else:
        given = _declared(model)
    named = dict(model.named_modules(remove_duplicate=False))
    names: list[str] = []
    blocks: set[str] = set()
    for name in given:
        module = named.get(name)
        if module is None:
            near = difflib.get_close_matches(name, [known for known in named if known], n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise PrepareError(
                f"PipelineParallelConfig(modules=…) names {name!r}, which is no module of {type(model).__name__}.{hint}"
            )
        if isinstance(module, nn.ModuleList):
            items = [f"{name}.{item}" for item in module._modules]
            names += items
            blocks.update(items)
        else:
            names.append(name)
    return names, blocks or set(names)


def _declared(model: nn.Module) -> list[str]:
    """The modules that a model of transformers names in its plans of pipelines."""
    kind = type(model).__name__
    if not takes_embeddings(model):
        raise PrepareError(
            f"{kind} is no nn.Sequential, so how to cut it into stages of a pipeline is not known. {_HOW}"
        )
    base = getattr(model, "base_model", model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    plan: Mapping[str, object] | None = getattr(base.config, "base_model_pp_plan", None)
    if not plan:
        raise PrepareError(f"{kind} of transformers declares no plan of pipelines. {_HOW}")
    own = {} if base is model else (type(model).__dict__.get("_pp_plan") or {})
    names = [f"{prefix}{name}" for name in plan] + list(own)
    named = dict(model.named_modules())
    return [name for name in names if name in named]


def _check_complete(model: nn.Module, names: Sequence[str]) -> None:
    prefixes = tuple(f"{name}." for name in names)
    twice = [name for place, name in enumerate(names) if name.startswith(prefixes) or name in names[:place]]
    if twice:
        raise PrepareError(
            f"{twice[0]!r} stands twice among the modules of the pipeline, by itself or inside of another. Name each "
            "module once."
        )
    left = [
        name for name, _ in model.named_parameters(remove_duplicate=False) if not name.startswith(prefixes)
    ]
    if left:
        raise PrepareError(
            f"{left[0]!r} (of {len(left)} parameters) of {type(model).__name__} is in none of the modules of the "
            f"pipeline ({listed(names, 6)}), so no stage would hold it. {_HOW}"
        )


def _at(names: Sequence[str], cuts: Sequence[str], count: int, kind: str) -> tuple[tuple[str, ...], ...]:
    if len(cuts) != count - 1:
        raise PrepareError(
            f"PipelineParallelConfig(cuts=…) has {len(cuts)} names, and {count} stages begin at {count - 1} modules "
            "besides the first. Name the module with which each stage but the first begins."
        )
    places = [0]
    for name in cuts:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = (
                f" Did you mean {' or '.join(map(repr, near))}?" if near else f" They are {listed(names, 6)}."
            )
            raise PrepareError(
                f"PipelineParallelConfig(cuts=…) names {name!r}, which is none of {kind}'s modules.{hint}"
            )
        place = names.index(name)
        if place <= places[-1]:
            raise PrepareError(
                f"PipelineParallelConfig(cuts=…) names {name!r}, before which a stage would be empty. Name the modules "
                "in the order in which they are called, none twice and not the first."
            )
        places.append(place)
    return tuple(
        tuple(names[start:stop]) for start, stop in zip(places, [*places[1:], len(names)], strict=True)
    )


def _balanced(
    model: nn.Module, names: Sequence[str], blocks: set[str], count: int
) -> tuple[tuple[str, ...], ...]:
    """The contiguous stages whose largest one is smallest, by bytes of parameters; each has a layer."""
    usable = [place for place, name in enumerate(names) if name in blocks]
    if len(usable) < count:
        raise PrepareError(
            f"{type(model).__name__} has {len(usable)} layers, which cannot make {count} stages of a pipeline. Choose "
            "a smaller pp_size, or fewer stages_per_rank."
        )
    sizes = [_bytes(model.get_submodule(name)) for name in names]
    # What is before the first layer goes with it, and what is after the last one with that.
    pieces = [[place] for place in usable]
    pieces[0] = list(range(usable[1] if len(usable) > 1 else len(names)))
    for index in range(1, len(usable)):
        stop = usable[index + 1] if index + 1 < len(usable) else len(names)
        pieces[index] = list(range(usable[index], stop))
    weights = [sum(sizes[place] for place in piece) for piece in pieces]
    starts = balanced_starts(weights, count)
    bounds = [*starts, len(pieces)]
    return tuple(
        tuple(names[place] for piece in pieces[start:stop] for place in piece)
        for start, stop in itertools.pairwise(bounds)
    )


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _check_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name in stage:
            found: list[tuple[str, Tensor]] = list(
                model.get_submodule(name).named_parameters(name, remove_duplicate=False)
            )
            for full, parameter in found:
                first, known = owner.setdefault(id(parameter), (number, full))
                if first != number:
                    one, other = (path.rpartition(".")[0] for path in (known, full))
                    same = model.get_submodule(one) is model.get_submodule(other)
                    are = (
                        f"are in one module, which is there twice ({one!r}, {other!r})"
                        if same
                        else "are tied weights"
                    )
                    raise PrepareError(
                        f"{known!r} and {full!r} of {type(model).__name__} are one parameter: they {are}. They would "
                        f"be in the stages {first} and {number} of the pipeline, which train them apart. Untie them "
                        "(tie_word_embeddings=False in the configuration of transformers, or a module of its own for "
                        "each place), or train without pp_size."
                    )
