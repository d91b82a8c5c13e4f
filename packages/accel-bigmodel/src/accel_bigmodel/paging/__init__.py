"""Weights as pages of mapped files, in less memory than the files take."""
