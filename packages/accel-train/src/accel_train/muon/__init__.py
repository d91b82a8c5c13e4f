"""Muon for matrices and AdamW for the rest, in one optimizer, on whole and on divided parameters."""
