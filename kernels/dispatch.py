def resolve_backend(operator, backend, device, available):
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend {backend}")
    return "torch"
