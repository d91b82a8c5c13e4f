"""Hooks around ``forward``: on modules of any model, reversibly, seen and understood by other libraries."""
