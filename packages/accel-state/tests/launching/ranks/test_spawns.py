import pickle

from accel_state.launching.ranks.spawns import packed


def test_a_function_that_is_sent_keeps_the_name_of_its_file():
    names: dict[str, object] = {"__name__": "__main__"}
    exec(
        compile("def train(epochs):\n    return [epoch for epoch in range(epochs)]\n", "cell-7", "exec"),
        names,
    )
    function, args = pickle.loads(packed(names["train"], (3,)))
    assert function(*args) == [0, 1, 2]
    assert function.__code__.co_filename == "cell-7"


def test_code_inside_of_a_function_keeps_it_too():
    def outer():
        def inner():
            return 7

        return inner

    outer.__module__ = "__main__"
    function, args = pickle.loads(packed(outer, ()))
    assert function(*args)() == 7
    assert function(*args).__code__.co_filename == __file__
