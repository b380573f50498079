"""Watching a model after it was put to work.

:class:`Monitor` reads the scores of inputs as they come and raises an alarm when they stop being
exchangeable with the validation data. ``ranks`` makes independent p-values of scores, by ranking
each input among the references and the inputs before it; ``martingale`` bets on these p-values, so
that the chance of ever raising a false alarm is bounded; ``trace`` keeps what a picture needs of
the past in constant memory; ``performance`` gathers labels that come late; ``merging`` says what
several processes found together; ``files`` saves and resumes; ``outlets`` writes JSON lines and the
text that Prometheus reads; ``pictures`` draws. Nothing here changes a model.
"""

from .merging import Merged
from .monitor import Monitor
from .outlets import LayerDrift, Status
from .performance import Window

__all__ = ["LayerDrift", "Merged", "Monitor", "Status", "Window"]
