"""Giving the weights of a training to other processes, such as inference engines, while it runs."""
