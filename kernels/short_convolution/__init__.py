def short_convolution(*a, **k): raise RuntimeError
