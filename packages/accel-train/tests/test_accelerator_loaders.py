"""How loaders are prepared, as scripts read and change it."""

from accel_train import Accelerator, DataLoaderConfiguration


def test_each_name_is_a_field_of_the_configuration():
    config = DataLoaderConfiguration(dispatch_batches=False, non_blocking=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=config)
    assert accelerator.dataloader_config == config
    names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
    for name in (*names, "use_stateful_dataloader"):
        assert getattr(accelerator, name) == getattr(config, name), name


def test_a_script_may_change_them_before_it_prepares_loaders():
    accelerator = Accelerator()
    accelerator.even_batches = False
    assert not accelerator.dataloader_config.even_batches
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    assert accelerator.split_batches
    assert accelerator.even_batches
