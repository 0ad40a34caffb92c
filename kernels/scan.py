import torch
def linear_scan(a, b, initial=None):
    h = initial if initial is not None else torch.zeros_like(b[:, 0])
    a = a.expand_as(b)
    out = []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        out.append(h)
    return torch.stack(out, 1)
