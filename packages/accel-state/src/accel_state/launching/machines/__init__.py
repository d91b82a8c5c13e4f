"""Starts that take several machines: torch's elastic agents, the launchers of MPI and DeepSpeed, and TPU pods."""
