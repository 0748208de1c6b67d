"""Distillation: what a teacher thinks of the student's own tokens, added to their advantages."""

from verifiers_rl.distill.teacher import Distillation as Distillation
from verifiers_rl.distill.teacher import Teacher as Teacher
