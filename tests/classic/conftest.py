"""Tests of classic environments, which verifiers has before 0.4."""

from tests.helpers import HAS_CLASSIC

collect_ignore_glob = [] if HAS_CLASSIC else ["*.py"]
