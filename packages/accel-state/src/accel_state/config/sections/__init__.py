"""The sections of the launch schema, one file each."""
