def rg_lru(*a, **k): raise RuntimeError
