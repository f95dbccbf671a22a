"""The conformance kit, a case per check: ``pytest -k static``, ``pytest -k "kv or attention"``."""

from lantern_accel.testing.cases import test_conforms, test_conforms_to_its_own_checks

__all__ = ["test_conforms", "test_conforms_to_its_own_checks"]
