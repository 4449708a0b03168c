"""Ranks: groups, agreement, the executor, the arithmetic and exchange of shards. No model, no file, no command."""
