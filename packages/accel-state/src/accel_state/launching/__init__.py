"""Starting processes: from a resolved configuration to running ranks.

``spec`` is pure and says which commands run in which environment; ``supervisor`` runs them on one node;
``elastic`` and ``mpi`` build the commands of the engines that start ranks on several nodes; ``inline`` starts
ranks from a running Python process (notebooks, debugging). Nothing here imports torch, except ``inline`` when
its functions are called.
"""
