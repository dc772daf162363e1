"""``ecckpt demo``: a small GPT loses half of its nodes and continues bit-identically.

``show.py`` runs the demo, ``launch.py`` starts trainings, and ``train.py`` is the training program,
with ``model.py`` and ``corpus.py``.
"""
