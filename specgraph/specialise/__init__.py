"""Compiles the variants of a step that requests ask for, each when it is first needed.

Its passes are in no pipeline: ``specialise_step`` leaves out what a kind of request does not need, ``pack_rows`` runs
prompts without padding, ``pause_step`` lets the host change logits, ``process_drafts`` and ``trace_step`` are for
requests that ask for them, and ``score_rows`` makes the step of ``score``. ``index_rows`` ends every compilation.
"""
