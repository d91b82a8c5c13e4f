from __future__ import annotations

import dataclasses
import gc
import itertools
import pickle
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state import trees

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "n"
    cached: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    derived: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "derived", self.x * 2)


class Encoding(UserDict):
    """Like a tokenizer's output: a UserDict with state of its own and a method to move."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, item):
        try:
            return self.__dict__["data"][item]
        except KeyError:
            raise AttributeError(item) from None

    def to(self, device):
        self.data = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.data.items()}
        return self


class Output(OrderedDict):
    """Like a model's output: a dictionary whose items are attributes too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            super().__setattr__(key, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Outer(Mapping):
    """A mapping around a dictionary: a shallow copy would share it."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class TaggedList(list):
    tag = None


class TaggedTuple(tuple):
    pass


class Movable:
    def __init__(self):
        self.calls = []

    def to(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "moved"


class StrictMovable(Movable):
    def to(self, device):
        self.calls.append(device)
        return "moved"


def double(tree: Any) -> Any:
    return trees.recursively_apply(lambda t: t * 2, tree)


def one() -> torch.Tensor:
    return torch.ones(2)


def two() -> torch.Tensor:
    return torch.full((2,), 2.0)


class TestKeepsTypes:
    def test_named_tuple(self):
        out = double(Pair(one(), Pair(one(), "s")))
        assert type(out) is Pair
        assert type(out.b) is Pair
        assert out.b.b == "s"
        assert torch.equal(out.b.a, two())

    def test_user_dict_with_state(self):
        source = Encoding({"ids": one(), "text": "t"}, encodings=["e"])
        out = double(source)
        assert type(out) is Encoding
        assert out.encodings == ["e"]
        assert torch.equal(out["ids"], two())
        assert torch.equal(source["ids"], one())

    def test_model_output(self):
        source = Output(logits=one(), loss=one())
        out = double(source)
        assert type(out) is Output
        assert out.logits is out["logits"]
        assert torch.equal(out.logits, two())
        assert torch.equal(source.logits, one())

    def test_mapping_around_a_dictionary_is_not_changed(self):
        source = Outer({"x": one()})
        out = double(source)
        assert type(out) is Outer
        assert torch.equal(out["x"], two())
        assert torch.equal(source["x"], one())

    def test_read_only_view(self):
        out = double(types.MappingProxyType({"x": one()}))
        assert torch.equal(out["x"], two())

    def test_other_dictionaries(self):
        out = double(defaultdict(list, {"x": one()}))
        assert type(out) is defaultdict
        assert out["new"] == []
        assert list(double(OrderedDict([("b", one()), ("a", one())]))) == ["b", "a"]
        assert type(double(Counter(a=1))) is Counter

    def test_list_and_tuple_subclasses(self):
        source = TaggedList([one()])
        source.tag = "t"
        out = double(source)
        assert type(out) is TaggedList
        assert out.tag == "t"
        assert torch.equal(source[0], one())
        pair = TaggedTuple((one(),))
        pair.tag = "u"
        assert type(double(pair)) is TaggedTuple
        assert double(pair).tag == "u"

    def test_return_types_of_torch(self):
        values = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
        out = trees.recursively_apply(lambda t: t + 1, values)
        assert type(out) is type(values)
        assert out.values.item() == 4.0

    def test_dataclasses(self):
        batch = Batch(one())
        batch.cached = [one()]
        batch.extra = "kept"
        out = double(batch)
        assert type(out) is Batch
        assert (out.name, out.extra) == ("n", "kept")
        assert torch.equal(out.x, two())
        assert torch.equal(out.cached[0], two())
        assert torch.equal(batch.x, one())

    def test_frozen_dataclass_with_a_derived_field(self):
        frozen = Frozen(one())
        out = double(frozen)
        assert torch.equal(out.x, two())
        assert torch.equal(out.derived, torch.full((2,), 4.0))
        assert torch.equal(frozen.derived, two())

    def test_dataclass_without_tensors_is_itself(self):
        plain = dataclasses.make_dataclass("Plain", ["v"])(3)
        assert double([plain])[0] is plain

    def test_dataclass_with_a_field_not_set_yet(self):
        made = dataclasses.make_dataclass("Late", ["v", ("w", Any, dataclasses.field(init=False))])(one())
        out = double(made)
        assert torch.equal(out.v, two())
        assert not hasattr(out, "w")

    def test_honor_type(self):
        assert trees.honor_type([1], (i for i in "ab")) == ["a", "b"]
        assert trees.honor_type(Pair(1, 2), iter((3, 4))) == Pair(3, 4)
        assert type(trees.honor_type(TaggedTuple(), [1])) is TaggedTuple
        with pytest.raises(TypeError, match="dict"):
            trees.honor_type({}, [])

    def test_is_namedtuple(self):
        assert trees.is_namedtuple(Pair(1, 2))
        assert not trees.is_namedtuple((1, 2))
        assert not trees.is_namedtuple(Batch(one()))


class TestApply:
    def test_other_leaves_pass_or_are_refused_with_their_place(self):
        assert double([one(), "s"])[1] == "s"
        with pytest.raises(TypeError, match=r"found str at \['a'\]\[1\]\.b"):
            trees.recursively_apply(lambda t: t, {"a": [one(), Pair(one(), "bad")]}, error_on_other_type=True)

    def test_arguments_reach_the_function(self):
        out = trees.recursively_apply(lambda t, a, b=0: t + a + b, [one()], 1, b=2)
        assert torch.equal(out[0], torch.full((2,), 4.0))

    def test_structure_and_back(self):
        tree = {"a": torch.zeros(2, 3, dtype=torch.int16), "b": (torch.zeros(()), "s")}
        described = trees.get_data_structure(tree)
        assert described["a"] == trees.TensorInformation(torch.Size([2, 3]), torch.int16)
        assert trees.is_tensor_information(described["b"][0])
        made = trees.initialize_tensors(described)
        assert made["a"].shape == (2, 3)
        assert made["a"].dtype == torch.int16
        assert made["b"][0].shape == ()
        assert made["b"][1] == "s"
        assert trees.get_shape(tree) == {"a": [2, 3], "b": ([], "s")}


class TestSendToDevice:
    def test_moves_nested_structures_and_keeps_types(self):
        out = trees.send_to_device({"a": [one()], "b": Pair(one(), 3)}, "meta")
        assert out["a"][0].device.type == "meta"
        assert type(out["b"]) is Pair
        assert out["b"].b == 3

    def test_tensor_already_there_is_itself(self):
        x = one()
        assert trees.send_to_device((x,), "cpu")[0] is x

    def test_skip_keys_at_any_depth(self):
        tree = {"a": one(), "b": {"a": one(), "c": one()}}
        for keys in ("a", ["a"]):
            out = trees.send_to_device([tree], "meta", skip_keys=keys)[0]
            assert out["a"].device.type == "cpu"
            assert out["b"]["a"].device.type == "cpu"
            assert out["b"]["c"].device.type == "meta"

    def test_objects_with_a_to_method(self):
        assert trees.send_to_device([Movable()], "cpu") == ["moved"]
        movable, strict = Movable(), StrictMovable()
        trees.send_to_device([movable, strict], "meta", non_blocking=True)
        assert movable.calls == [((torch.device("meta"),), {"non_blocking": True})]
        assert strict.calls == [torch.device("meta")]

    def test_own_to_of_a_mapping_unless_keys_are_skipped(self):
        source = Encoding({"ids": one(), "mask": one()}, encodings=["e"])
        out = trees.send_to_device(source, "meta", skip_keys="mask")
        assert out is not source
        assert out.encodings == ["e"]
        assert out["mask"].device.type == "cpu"
        assert out["ids"].device.type == "meta"
        assert source["ids"].device.type == "cpu"
        assert trees.send_to_device(source, "meta") is source

    def test_an_error_inside_to_is_not_hidden(self):
        class Broken:
            def to(self, device, non_blocking=False):
                raise TypeError("inner")

        with pytest.raises(TypeError, match="inner"):
            trees.send_to_device(Broken(), "meta", non_blocking=True)

    @pytest.mark.gpu
    def test_copy_to_cpu_is_finished_even_when_asked_not_to_block(self):
        big = torch.arange(10_000_000, device=torch.accelerator.current_accelerator())
        assert torch.equal(trees.send_to_device(big, "cpu", non_blocking=True), torch.arange(10_000_000))

    def test_compiles(self):
        def step(x):
            return trees.send_to_device({"x": x}, "cpu")["x"] + 1

        compiled = torch.compile(step, backend="eager")
        assert torch.equal(compiled(one()), two())


class TestReading:
    def test_find_batch_size(self):
        assert trees.find_batch_size({"text": ["a", "b"], "x": [torch.zeros(()), torch.zeros(5, 2)]}) == 5
        for empty in ([], {}, (), torch.zeros(())):
            with pytest.raises(ValueError, match="batch size"):
                trees.find_batch_size(empty)
            assert trees.ignorant_find_batch_size(empty) is None
        with pytest.raises(TypeError, match="str"):
            trees.find_batch_size(["a"])
        assert trees.ignorant_find_batch_size(["a"]) is None
        assert trees.ignorant_find_batch_size(Batch(torch.zeros(3))) == 3

    def test_find_device(self):
        assert trees.find_device([1, {"a": torch.zeros(1, device="meta")}]) == torch.device("meta")
        assert trees.find_device(["x"]) is None

    def test_listify(self):
        tree = {"a": torch.tensor([1, 2]), "b": (torch.tensor(0.5, dtype=torch.bfloat16), "s")}
        assert trees.listify(tree) == {"a": [1, 2], "b": (0.5, "s")}
        assert trees.listify(torch.tensor([0.5]).to(torch.float8_e4m3fn)) == [0.5]

    def test_convert_to_fp32(self):
        tree = [one().half(), one().bfloat16(), one().double(), torch.ones(2, dtype=torch.int8), "s"]
        out = trees.convert_to_fp32(tree)
        assert [t.dtype for t in out[:4]] == [torch.float32, torch.float32, torch.float64, torch.int8]
        assert out[4] == "s"

    def test_tensor_leaves(self):
        x, y = one(), one()
        assert [id(t) for t in trees.tensor_leaves([x, {"k": y}])] == [id(x), id(y)]
        with pytest.raises(TypeError, match=r"int at \[1\]"):
            trees.tensor_leaves([x, 1])
        with pytest.raises(TypeError, match="int at the top"):
            trees.tensor_leaves(1)


class TestSlicing:
    def test_slice_tensors(self):
        tree = {"x": torch.arange(6), "m": [torch.arange(12).view(6, 2)]}
        out = trees.slice_tensors(tree, slice(1, 3), process_index=0, num_processes=2)
        assert torch.equal(out["x"], torch.tensor([1, 2]))
        assert torch.equal(out["m"][0], torch.tensor([[2, 3], [4, 5]]))

    def test_concatenate(self):
        parts = [
            {"x": torch.tensor([[i]]), "p": Pair(torch.tensor([i]), [torch.tensor([i])])} for i in range(3)
        ]
        out = trees.concatenate(parts)
        assert torch.equal(out["x"], torch.tensor([[0], [1], [2]]))
        assert type(out["p"]) is Pair
        assert torch.equal(out["p"].b[0], torch.tensor([0, 1, 2]))
        assert trees.concatenate([p["x"] for p in parts], dim=1).shape == (1, 3)

    def test_concatenate_matches_mappings_by_key(self):
        out = trees.concatenate([{"a": one(), "b": one()}, {"b": one() * 3, "a": one() * 2}])
        assert torch.equal(out["a"], torch.tensor([1.0, 1, 2, 2]))
        assert list(out) == ["a", "b"]

    def test_concatenate_refuses(self):
        assert trees.concatenate(["s"]) == "s"
        with pytest.raises(TypeError, match="str"):
            trees.concatenate(["s", "t"])
        with pytest.raises(ValueError, match="different structure"):
            trees.concatenate([{"a": one()}, {"b": one()}])
        with pytest.raises(ValueError, match="different structure"):
            trees.concatenate([[one()], [one(), one()]])
        with pytest.raises(ValueError, match="at least one"):
            trees.concatenate([])

    @pytest.mark.parametrize(("rows", "processes", "expected"), [(5, 2, 6), (4, 2, 4), (1, 4, 4), (7, 4, 8)])
    def test_pad_input_tensors(self, rows, processes, expected):
        tree = {"x": torch.ones(rows, 2), "other": torch.ones(rows + 1), "s": "s"}
        out = trees.pad_input_tensors(tree, rows, processes)
        assert out["x"].shape == (expected, 2)
        assert out["x"].sum() == rows * 2
        assert torch.equal(out["x"][:rows], tree["x"])
        assert out["other"].shape == (rows + 1,)
        sideways = trees.pad_input_tensors(torch.ones(2, rows), rows, processes, dim=1)
        assert sideways.shape == (2, expected)


tensors = st.integers(1, 3).map(lambda n: torch.arange(float(n * 2)).view(n, 2))
leaves = st.one_of(tensors, st.integers(), st.text(max_size=2), st.none())


def containers(children):
    words = st.dictionaries(st.text(max_size=2), children, max_size=3)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(TaggedTuple),
        words,
        st.dictionaries(st.integers(), children, max_size=3).map(OrderedDict),
        words.map(lambda d: defaultdict(list, d)),
        words.map(UserDict),
        st.tuples(children, children).map(lambda p: Pair(*p)),
        st.tuples(tensors, st.text(max_size=2)).map(lambda p: Batch(*p)),
        tensors.map(Frozen),
    )


def same(a: Any, b: Any) -> bool:
    """Equality by plain recursion over what these tests generate."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


@settings(max_examples=150, deadline=None)
@given(st.recursive(leaves, containers, max_leaves=8))
def test_flatten_and_unflatten_are_inverse(tree):
    found, spec = trees.flatten(tree)
    assert all(isinstance(leaf, torch.Tensor) for leaf in found)
    assert same(trees.unflatten(spec, found), tree)
    assert same(trees.recursively_apply(lambda t: t, tree), tree)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.data())
def test_slices_concatenate_to_the_whole(rows, data):
    tree = {"x": torch.randn(rows, 2), "n": Pair(torch.arange(rows), [torch.randn(rows, 1, 3)])}
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    parts = [trees.slice_tensors(tree, slice(a, b)) for a, b in itertools.pairwise(cuts)]
    assert same(trees.concatenate(parts), tree)


def test_specs_are_plain_data():
    tree = {"a": [one(), ("s", 3)], "b": OrderedDict(c=one(), d=defaultdict(list, e=one()))}
    found, spec = trees.flatten(tree)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert same(trees.unflatten(again, found), tree)


def test_unflatten_counts_its_tensors():
    found, spec = trees.flatten([one(), one()])
    with pytest.raises(ValueError, match="fewer"):
        trees.unflatten(spec, found[:1])
    with pytest.raises(ValueError, match="more"):
        trees.unflatten(spec, [*found, one()])


def test_specs_of_different_trees_differ():
    def spec(tree):
        return trees.flatten(tree)[1]

    assert spec([one()]) == spec([torch.zeros(9)])
    assert spec([one()]) != spec((one(),))
    assert spec({"a": one()}) != spec({"b": one()})
    assert spec([one(), 1]) != spec([one(), 2])


@pytest.mark.wide(but=["<lambda>0", "<lambda>1"])
@pytest.mark.parametrize(
    "call",
    [
        lambda tree: trees.recursively_apply(lambda leaf: leaf + 1, tree),
        lambda tree: trees.send_to_device(tree, "meta"),
        lambda tree: trees.unflatten(trees.flatten(tree)[1], trees.flatten(tree)[0]),
        lambda tree: trees.concatenate([tree, tree]),
        lambda tree: trees.path_of(tree, tree["x"][0]),
        lambda tree: trees.listify(tree),
    ],
)  # fmt: skip
def test_tensors_are_freed_without_a_collection_of_cycles(call):
    """A batch that waits for Python's collection takes memory of the device until then."""
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    gc.collect()
    gc.disable()
    try:
        call({"x": (tensor,)})
        del tensor
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("tree", [None, [None]])
def test_nothing_at_all_is_no_tensor_either(tree):
    with pytest.raises(TypeError, match="NoneType at"):
        trees.recursively_apply(torch.neg, tree, error_on_other_type=True)
    with pytest.raises(TypeError, match="NoneType at"):
        trees.flatten(tree, only_tensors=True)
