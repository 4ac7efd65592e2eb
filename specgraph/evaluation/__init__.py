"""Clients that evaluate models, with a decoder behind them."""
