"""Launching: from a resolved configuration to running ranks.

``plan`` computes, without side effects, the commands and their environments, and ``run`` carries them out. ``ranks``
has the processes of one machine, ``watching`` their output, progress and stacks, ``machines`` the launchers that start
ranks on several machines, ``submission`` the jobs of schedulers and clouds. ``notebook`` starts ranks from a running
Python process. Nothing here imports torch, except the functions of ``notebook`` and the process of ``agent``.
"""
