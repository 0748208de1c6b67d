"""Distillation: what a teacher thinks of the student's own tokens, added to their advantages.

teacher.py   `Teacher`: a model behind a vLLM server, and the client that asks it
scoring.py   `Distillation`: a scorer of groups, which `WeightedEnv(scorer=...)` takes
tables.py    reads the [[teacher]]s of a TOML, and the keys of an [[env]] that learns from one
"""

from verifiers_rl.distill.scoring import Distillation as Distillation
from verifiers_rl.distill.teacher import Teacher as Teacher
from verifiers_rl.distill.teacher import TeacherError as TeacherError
