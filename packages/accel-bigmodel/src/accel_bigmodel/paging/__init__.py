"""Paging: mapped weights of a model in less memory than the files take."""
