"""Ranks as operating-system processes: how they start, how one node's are supervised, and how they end."""
