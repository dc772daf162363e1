"""Operations on whole runs from outside the training: verify, repair, forget (docs/OPERATIONS.md).

``ecckpt/cli/admin.py`` calls them.
"""
