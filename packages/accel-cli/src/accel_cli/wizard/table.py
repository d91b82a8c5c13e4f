"""The table of all questions, in the order in which they are asked."""

from __future__ import annotations

from accel_cli.wizard.engine_questions import ENGINE_QUESTIONS
from accel_cli.wizard.place_questions import MACHINE_QUESTIONS, RENDEZVOUS_QUESTIONS
from accel_cli.wizard.run_questions import RUN_QUESTIONS, TPU_QUESTIONS
from accel_cli.wizard.sagemaker_questions import SAGEMAKER_QUESTIONS

__all__ = ["QUESTIONS"]

QUESTIONS = (
    *MACHINE_QUESTIONS,
    *ENGINE_QUESTIONS,
    *RENDEZVOUS_QUESTIONS,
    *TPU_QUESTIONS,
    *RUN_QUESTIONS,
    *SAGEMAKER_QUESTIONS,
)
"""Every question; which of them are asked follows from their conditions."""
