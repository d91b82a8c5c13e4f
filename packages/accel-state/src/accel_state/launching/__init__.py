"""Launching: from a resolved configuration to running ranks.

``plan`` computes, without side effects, the commands and their environments; ``supervisor`` runs them on one node;
``elastic`` and ``mpi`` build the commands of the launchers that start ranks on several nodes; ``notebook`` forks ranks
from a running Python process (notebooks, debugging). Nothing here imports torch, except the functions of ``notebook``.
"""
