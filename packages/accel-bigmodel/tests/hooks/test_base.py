"""Putting hooks around forward and taking them off again."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x, scale=1.0, *, module=None):
        return self.linear2(self.norm(self.linear1(x))) * scale


class AddToInput(ModelHook):
    def __init__(self, value=1.0):
        self.value = value

    def pre_forward(self, module, /, *args, **kwargs):
        return (args[0] + self.value, *args[1:]), kwargs


class AddToOutput(ModelHook):
    def post_forward(self, module, output):
        return output + 1


class Log(ModelHook):
    def __init__(self, name, log, fail=None):
        self.name, self.log, self.fail = name, log, fail

    def _note(self, event):
        self.log.append((self.name, event))
        if self.fail == event:
            raise RuntimeError(f"{self.name} fails in {event}")

    def init_hook(self, module):
        self._note("init")
        return module

    def pre_forward(self, module, /, *args, **kwargs):
        self._note("pre")
        return args, kwargs

    def post_forward(self, module, output):
        self._note("post")
        return output

    def forward_failed(self, module):
        self.log.append((self.name, "failed"))

    def detach_hook(self, module):
        self._note("detach")
        return module


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


def test_a_hook_leaves_its_marks_and_takes_them_along(model):
    plain = dict(vars(model))
    signature = inspect.signature(model.forward)
    hook = ModelHook()
    assert add_hook_to_module(model, hook) is model
    assert model._hf_hook is hook
    assert model._old_forward.__func__ is Model.forward
    assert model.forward.__name__ == "forward"
    assert inspect.signature(model.forward) == signature
    assert remove_hook_from_module(model) is model
    assert vars(model) == plain


def test_a_forward_of_the_instance_comes_back(model, x):
    model.forward = own = lambda x: x
    add_hook_to_module(model, AddToInput())
    assert torch.equal(model(x), x + 1)
    remove_hook_from_module(model)
    assert vars(model)["forward"] is own


def test_hooks_change_inputs_and_outputs(model, x):
    expected_pre, expected = model(x + 1), model(x)
    add_hook_to_module(model, AddToInput())
    assert torch.equal(model(x), expected_pre)
    add_hook_to_module(model, AddToOutput())
    assert torch.equal(model(x), expected + 1)
    remove_hook_from_module(model)
    assert torch.equal(model(x), expected)


def test_a_second_hook_replaces_the_first_which_is_told(model):
    log = []
    add_hook_to_module(model, Log("a", log))
    add_hook_to_module(model, Log("b", log))
    assert log == [("a", "init"), ("a", "detach"), ("b", "init")]
    assert model._old_forward.__func__ is Model.forward


def test_appended_hooks_run_in_order_and_are_not_begun_again(model, x):
    log = []
    first, second = Log("a", log), Log("b", log)
    add_hook_to_module(model, first)
    add_hook_to_module(model, second, append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert model._hf_hook.hooks == (first, second)
    model(x)
    remove_hook_from_module(model)
    assert log == [
        *[("a", "init"), ("b", "init"), ("a", "pre"), ("b", "pre"), ("a", "post"), ("b", "post")],
        *[("b", "detach"), ("a", "detach")],
    ]


def test_appending_to_nothing_is_adding(model):
    hook = ModelHook()
    add_hook_to_module(model, hook, append=True)
    assert model._hf_hook is hook


def test_keyword_arguments_pass_even_one_called_module(model, x):
    add_hook_to_module(model, SequentialHook(ModelHook(), ModelHook()))
    assert torch.equal(model(x, module=3, scale=2.0), Model.forward(model, x) * 2)


@pytest.mark.parametrize("wrap", [lambda hook: hook, lambda hook: SequentialHook(ModelHook(), hook)])
def test_no_grad_hooks(model, x, wrap):
    class NoGrad(ModelHook):
        no_grad = True

    assert model(x).requires_grad
    add_hook_to_module(model, wrap(NoGrad()))
    assert not model(x).requires_grad
    assert torch.is_grad_enabled()


def test_a_failing_forward_tells_every_hook_and_keeps_its_exception(model):
    log = []
    add_hook_to_module(model, SequentialHook(Log("a", log), Log("b", log)))
    log.clear()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(1, 7))
    assert log == [("a", "pre"), ("b", "pre"), ("a", "failed"), ("b", "failed")]


def test_a_hook_that_fails_before_forward_undoes_those_before_it(model, x):
    log = []
    hooks = Log("a", log), Log("b", log, fail="pre"), Log("c", log)
    add_hook_to_module(model, SequentialHook(*hooks))
    log.clear()
    with pytest.raises(RuntimeError, match="b fails in pre"):
        model(x)
    assert log == [("a", "pre"), ("b", "pre"), ("a", "failed")]


def test_a_hook_that_fails_after_forward_does_not_keep_the_others_from_ending(model, x):
    log = []
    hooks = Log("a", log), Log("b", log, fail="post"), Log("c", log)
    add_hook_to_module(model, SequentialHook(*hooks))
    log.clear()
    with pytest.raises(RuntimeError, match="b fails in post"):
        model(x)
    assert log[3:] == [("a", "post"), ("b", "post"), ("c", "failed")]


def test_a_hook_that_cannot_begin_leaves_no_mark(model):
    plain = dict(vars(model))
    with pytest.raises(RuntimeError, match="a fails in init"):
        add_hook_to_module(model, Log("a", [], fail="init"))
    assert vars(model) == plain


@pytest.mark.parametrize("wrap", [lambda hook: hook, SequentialHook])
@pytest.mark.parametrize("append", [False, True])
def test_a_hook_that_forgets_to_return_the_module(model, x, wrap, append):
    class Forgetful(ModelHook):
        def init_hook(self, module):
            pass

    expected = model(x)
    add_hook_to_module(model, present := ModelHook())
    with pytest.raises(TypeError, match=r"init_hook of .*Forgetful returned None; it must return the module"):
        add_hook_to_module(model, wrap(Forgetful()), append=append)
    assert model._hf_hook is present
    assert torch.equal(model(x), expected)


def test_a_module_may_call_itself(x):
    class Twice(nn.Module):
        def forward(self, x, again=True):
            return self(x * 2, again=False) if again else x

    module = add_hook_to_module(Twice(), SequentialHook(AddToInput(), AddToOutput()))
    assert torch.equal(module(x), (x + 1) * 2 + 1 + 1 + 1)


def test_a_hook_may_go_while_its_forward_runs(x):
    class Leaves(nn.Module):
        def forward(self, x):
            remove_hook_from_module(self)
            return x

    module = add_hook_to_module(Leaves(), AddToOutput())
    assert torch.equal(module(x), x + 1)
    assert torch.equal(module(x), x)


def test_removing_from_all_that_is_inside(model):
    for module in (model, model.linear1, model.linear2):
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model)
    assert hasattr(model.linear1, "_hf_hook")
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") or "forward" in vars(module) for module in model.modules())
    add_hook_to_module(model.linear1, ModelHook())
    remove_hook_from_module(model, recurse=True)
    assert not hasattr(model.linear1, "_hf_hook")


def test_removing_takes_the_guards_of_dispatching_along(model):
    for name in ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron"):
        setattr(model, name, lambda *args: None)
    remove_hook_from_module(model)
    assert model.to(torch.float64) is model
    assert not {"to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron"} & vars(model).keys()


def test_only_hooks_of_this_library_are_taken(model):
    with pytest.raises(TypeError, match=r"must be an accel_bigmodel\.ModelHook, got builtins\.dict"):
        add_hook_to_module(model, {})
    with pytest.raises(TypeError, match=r"builtins\.int"):
        SequentialHook(ModelHook(), 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(model, x, copied):
    add_hook_to_module(model.linear1, AddToInput(1.0))
    add_hook_to_module(model, AddToOutput())
    other = copied(model)
    expected = model(x)
    assert torch.equal(other(x), expected)
    other.linear1._hf_hook.value = 5.0
    with torch.no_grad():
        other.linear2.weight.zero_()
    assert torch.equal(model(x), expected)
    assert other._old_forward.__self__ is other
    assert torch.equal(other(x), other.linear2.bias.expand(2, 5) + 1)
    remove_hook_from_submodules(other)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(model(x), expected)


def test_torch_save_and_load_keep_the_hook(model, x):
    add_hook_to_module(model, AddToInput())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_a_graph_module_is_not_frozen_by_a_hook(model, x):
    graph = torch.fx.symbolic_trace(model)
    expected = graph(x)
    add_hook_to_module(graph, AddToOutput())
    assert torch.equal(graph(x), expected + 1)

    def add_sigmoid():
        output = next(node for node in graph.graph.nodes if node.op == "output")
        with graph.graph.inserting_before(output):
            output.args = (graph.graph.call_function(torch.sigmoid, (output.args[0],)),)
        graph.recompile()

    add_sigmoid()
    assert torch.equal(graph(x), expected.sigmoid() + 1)
    remove_hook_from_module(graph)
    assert torch.equal(graph(x), expected.sigmoid())
    add_sigmoid()
    assert torch.equal(graph(x), expected.sigmoid().sigmoid())


@pytest.mark.usefixtures("fresh_compiler")
def test_hooks_that_only_compute_are_compiled_into_one_graph(model, x):
    add_hook_to_module(model.linear1, AddToInput())
    add_hook_to_module(model, AddToOutput())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.usefixtures("fresh_compiler")
def test_sequences_of_hooks_run_outside_of_graphs(model, x):
    seen = []

    class Look(ModelHook):
        def pre_forward(self, module, /, *args, **kwargs):
            seen.append(torch.compiler.is_compiling())
            return args, kwargs

    add_hook_to_module(model.linear1, SequentialHook(Look(), AddToInput()))
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
    assert seen == [False] * 4


class Wrapper(nn.Module):
    """Finds what it does not have in the module that it wraps, as the models of PEFT do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) * 3


def test_a_wrapper_does_not_take_the_hook_of_what_it_wraps_for_its_own(model, x):
    expected = model(x)
    inner = AddToOutput()
    add_hook_to_module(model, inner)
    wrapper = Wrapper(model)
    add_hook_to_module(wrapper, AddToOutput(), append=True)
    assert model._hf_hook is inner
    assert torch.equal(wrapper(x), (expected + 1) * 3 + 1)
    remove_hook_from_module(wrapper)
    assert torch.equal(wrapper(x), (expected + 1) * 3)


@pytest.mark.parametrize("recurse", [False, True])
def test_a_compiled_module_is_hooked_itself(model, x, recurse):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    add_hook_to_module(compiled, AddToOutput())
    assert torch.equal(compiled(x), expected + 1)
    assert not hasattr(model, "_hf_hook")
    remove_hook_from_module(compiled, recurse=recurse)
    assert torch.equal(compiled(x), expected)
    assert torch.equal(model(x), expected)


class HookWithWeights(nn.Module, ModelHook):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def post_forward(self, module, output):
        return output + self.weight


def test_a_hook_that_is_a_module_does_not_become_a_part_of_the_model(model, x):
    names, expected = list(model.state_dict()), model(x)
    add_hook_to_module(model, HookWithWeights())
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), expected + 1)
    remove_hook_from_module(model)
    assert torch.equal(model(x), expected)


def test_a_sequence_says_where_it_computes():
    align = AlignDevicesHook("meta")
    assert SequentialHook(ModelHook(), AlignDevicesHook(), align).execution_device == "meta"
    assert SequentialHook(ModelHook()).execution_device is None
