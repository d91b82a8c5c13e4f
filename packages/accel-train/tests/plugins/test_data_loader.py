"""Options of prepared loaders."""

import copy
import dataclasses
import pickle

import pytest

from accel_train import ArgumentTypeError, DataLoaderConfiguration


@pytest.mark.parametrize(
    "wrong",
    [{"split_batches": "yes"}, {"dispatch_batches": "auto"}, {"even_batches": None}, {"data_seed": "7"}],
)
def test_options_are_of_their_types_when_given_and_when_assigned(wrong):
    ((name, value),) = wrong.items()
    message = rf"DataLoaderConfiguration\({name}={value!r}\) must be"
    with pytest.raises(ArgumentTypeError, match=message):
        DataLoaderConfiguration(**wrong)
    config = DataLoaderConfiguration()
    with pytest.raises(ArgumentTypeError, match=message):
        setattr(config, name, value)
    assert config == DataLoaderConfiguration()


def test_clients_change_options_after_construction():
    config = DataLoaderConfiguration()
    config.data_seed = 7
    config.non_blocking = True
    config.dispatch_batches = None
    assert config == DataLoaderConfiguration(data_seed=7, non_blocking=True)


def test_an_option_that_does_not_exist_is_not_assigned_silently():
    with pytest.raises(AttributeError, match=r"no option 'dispatch_batch'.*Did you mean 'dispatch_batches'"):
        DataLoaderConfiguration().dispatch_batch = True


def test_configurations_are_copied_and_pickled():
    config = DataLoaderConfiguration(even_batches=False)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other == config
