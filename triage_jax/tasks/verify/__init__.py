"""Right or wrong? Reads the answer out of a completion and compares it with the gold answer.

Cheap exact rules decide in the calling thread; what they leave goes to math-verify in a child process that
is killed at its deadline. Nothing here imports math-verify except the child (`worker`).
"""

from triage_jax.tasks.verify.extract import extract_answer, last_boxed
from triage_jax.tasks.verify.verifier import MathVerifier, VerifierConfig

__all__ = ["MathVerifier", "VerifierConfig", "extract_answer", "last_boxed"]
