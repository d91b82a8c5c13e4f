"""Data loaders for many processes: sharding by arithmetic, dispatch, device transfer, resume."""
