"""Mixtures of data: from which of several sources the next batch comes."""
