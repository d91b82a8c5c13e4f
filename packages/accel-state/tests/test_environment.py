"""Reading variables, and changing them for a while."""

from __future__ import annotations

import os
import unittest

import pytest

from accel_state import environment
from accel_state.environment import (
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    snapshot,
    str_to_bool,
)
from accel_state.errors import ConfigError

TRUE = ["y", "Yes", "t", "TRUE", "on", "1", " true "]
FALSE = ["n", "No", "f", "FALSE", "off", "0"]


@pytest.mark.parametrize(("words", "truth"), [(TRUE, True), (FALSE, False)])
def test_truth_values(words, truth):
    for word in words:
        assert str_to_bool(word) == int(truth)
        assert type(str_to_bool(word)) is int
        assert str_to_bool(word, to_bool=True) is truth
        with patch_environment(accel_test_flag=word):
            assert parse_flag_from_env("ACCEL_TEST_FLAG") is truth


def test_other_words_are_named():
    with pytest.raises(ConfigError, match="'maybe' is not a boolean"):
        str_to_bool("maybe")
    with (
        patch_environment(accel_test_flag="maybe"),
        pytest.raises(ConfigError, match="ACCEL_TEST_FLAG: 'maybe'"),
    ):
        parse_flag_from_env("ACCEL_TEST_FLAG")


def test_unset_variables_give_the_default():
    with clear_environment():
        assert parse_flag_from_env("X") is False
        assert parse_flag_from_env("X", True) is True
        assert parse_choice_from_env("X") == "no"
        assert parse_choice_from_env("X", "fp16") == "fp16"
        assert get_int_from_env(["X", "Y"], 7) == 7
        assert environment.get("X") is None
        assert environment.get("X", "d") == "d"
    with patch_environment(x=""):
        assert parse_flag_from_env("X", True) is True


def test_the_first_number_counts():
    with clear_environment(), patch_environment(a=-1, b=4, c=5):
        assert get_int_from_env(["A", "B", "C"], 7) == 4
    with patch_environment(a="four"), pytest.raises(ConfigError, match="variable A is 'four'"):
        get_int_from_env(["A"], 7)


def test_patches_are_taken_back():
    os.environ["ACCEL_TEST_OLD"] = "old"

    def fail_inside():
        with patch_environment(accel_test_old=1, accel_test_new=True):
            assert os.environ["ACCEL_TEST_OLD"] == "1"
            assert os.environ["ACCEL_TEST_NEW"] == "True"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert os.environ.pop("ACCEL_TEST_OLD") == "old"
    assert "ACCEL_TEST_NEW" not in os.environ


def test_values_for_the_rest_of_the_process():
    with patch_environment(ACCEL_TEST_KEPT="1"), clear_environment():
        environment.provide(accel_test_kept=2)
        environment.provide(accel_test_kept=3)
        assert environment.get("ACCEL_TEST_KEPT") == "2"
        environment.assign(accel_test_kept=3)
        assert environment.get("ACCEL_TEST_KEPT") == "3"


def test_clearing_is_taken_back():
    before = dict(os.environ)

    def fail_inside():
        with clear_environment():
            assert not os.environ
            os.environ["ACCEL_TEST_NEW"] = "1"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert dict(os.environ) == before


def test_a_snapshot_is_a_copy_that_nobody_can_change():
    with patch_environment(accel_test_new=1):
        taken = snapshot()
    assert taken["ACCEL_TEST_NEW"] == "1"
    with pytest.raises(TypeError):
        taken["ACCEL_TEST_NEW"] = "2"


def test_lines_of_an_environment_file():
    variables = {
        "GOOD": "1",
        "PATH_LIKE": "/a:/b",
        "EMPTY": "",
        "SEMI": "a;b",
        "LINE": "a\nb",
        "LESS": "<a",
        "MORE": ">a",
        "SPACE": "a b",
        "NAME ": "x",
    }
    with pytest.warns(UserWarning, match="unsafe") as said:
        assert convert_dict_to_env_variables(variables) == ["GOOD=1\n", "PATH_LIKE=/a:/b\n"]
    assert len(said) == 7


def leave(value):
    os.environ["ACCELERATE_LEFT"] = value
    os.environ["OTHER_LEFT"] = value


def check_restored():
    assert "ACCELERATE_LEFT" not in os.environ
    assert os.environ.pop("OTHER_LEFT") == "x"  # not one of ours


def test_a_function_is_purged():
    os.environ["ACCELERATE_KEPT"] = "before"

    @purge_accelerate_environment
    def change(value):
        """Said."""
        leave(value)
        os.environ["ACCELERATE_KEPT"] = "after"
        return value

    assert change("x") == "x"
    assert (change.__name__, change.__doc__) == ("change", "Said.")
    assert os.environ.pop("ACCELERATE_KEPT") == "before"
    check_restored()


def test_a_unittest_class_is_purged_with_its_subclasses():
    @purge_accelerate_environment
    class Base(unittest.TestCase):
        def setUp(self):
            leave("x")

        def test_it(self):
            assert os.environ["ACCELERATE_LEFT"] == "x"

    class Sub(Base):
        def setUp(self):
            leave("x")
            os.environ["ACCELERATE_LEFT_TOO"] = "y"

    for case in (Base, Sub):
        result = unittest.TestResult()
        case("test_it").run(result)
        assert result.testsRun == 1
        assert result.wasSuccessful()
        assert "ACCELERATE_LEFT_TOO" not in os.environ
        check_restored()


def test_a_pytest_class_is_purged_with_its_subclasses():
    @purge_accelerate_environment
    class Base:
        def setup_method(self):
            leave("x")

    class WithoutSuper(Base):
        def setup_method(self, method):
            assert method == "the test"
            leave("x")

    class WithSuper(Base):
        def setup_method(self):
            super().setup_method("the test")
            os.environ["ACCELERATE_LEFT_TOO"] = "y"

        def teardown_method(self):
            assert os.environ["ACCELERATE_LEFT_TOO"] == "y"

    class Plain(Base):
        pass

    for kind in (Base, WithoutSuper, WithSuper, Plain):
        instance = kind()
        instance.setup_method("the test")
        assert os.environ["ACCELERATE_LEFT"] == "x"
        os.environ["ACCELERATE_BY_TEST"] = "z"
        instance.teardown_method("the test")
        assert not {"ACCELERATE_BY_TEST", "ACCELERATE_LEFT_TOO"} & os.environ.keys()
        check_restored()
