"""What devices can do at most, by name: dense bfloat16 (or float16) operations a second. Pure.

From their makers' data sheets, without sparsity. A name that is not here has no utilisation until `engine.peak_tflops` says it.
"""

# The longer names first: "H100 PCIe" is not an "H100".
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_flops(device_name: str) -> float | None:
    """Operations a second of a device, by the name that its driver gives it; None for an unknown one."""
    words = device_name.replace("-", " ")
    for name, tflops in PEAK_TFLOPS:
        if f" {name} " in f" {words} ":
            return tflops * 1e12
    return None
