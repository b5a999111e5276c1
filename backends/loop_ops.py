"""Every operator with a loop form: importing this file fills the registry."""
from . import loop_pointwise, loop_reductions, loop_views
from .loop_build import FREE, HANDLERS, REDUCES, VIEWS, Refused, lower, refuse, size
from .loop_views import SPLITS

FORMS = (loop_pointwise, loop_views, loop_reductions)

__all__ = ["FORMS", "FREE", "HANDLERS", "REDUCES", "SPLITS", "VIEWS", "Refused", "lower", "refuse", "size"]
