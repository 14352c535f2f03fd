"""Trains a GPT-2 from llm.c's files, with llm.c's flags: python train.py --help."""

# For `uv run train.py`: the versions of constraints.txt, with which `make` installs.
#
# /// script
# requires-python = ">=3.12"
# dependencies = ["llmc-jax"]
#
# [tool.uv]
# sources = { llmc-jax = { path = ".", editable = true } }
# constraint-dependencies = [
#     "contourpy==1.4.0", "cycler==0.12.1", "flatbuffers==25.12.19", "fonttools==4.68.0", "kiwisolver==1.5.1",
#     "markdown-it-py==4.3.0", "matplotlib==3.11.2", "mdurl==0.1.2", "ml-dtypes==0.6.0", "numpy==2.5.5",
#     "opt-einsum==3.4.0", "packaging==26.3", "pillow==13.0.0", "pygments==2.21.0", "pyparsing==3.3.3",
#     "python-dateutil==4.0.0", "regex==2026.11.15", "requests==2.34.2", "rich==15.0.0", "scipy==1.18.1",
#     "tiktoken==0.14.0", "tornado==6.6.1", "absl-py==2.5.1", "aiofiles==25.1.0", "etils==1.15.0", "fsspec==2026.9.0",
#     "humanize==4.17.0", "msgpack==1.2.4", "orbax-checkpoint==0.12.8", "prometheus-client==0.26.0", "protobuf==7.36.2",
#     "psutil==7.2.2", "pyyaml==6.0.3", "simplejson==4.3.0", "tensorstore==0.1.86", "uvloop==0.23.0", "zipp==4.1.2",
#     "anyio==4.16.0", "click==8.5.1", "filelock==4.3.1", "h11==0.16.0", "hf-xet==1.8.0", "httpcore2==2.16.2",
#     "httpx2==2.16.2", "huggingface-hub==2.4.0", "tokenizers==0.23.3", "tqdm==4.70.1", "truststore==0.10.5",
#     "build==1.6.1", "execnet==2.1.2", "hypothesis==6.170.15", "iniconfig==2.3.1", "mypy==2.4.1",
#     "mypy-extensions==1.2.0", "pathspec==1.1.1", "pluggy==1.7.0", "pyarrow==26.0.1", "pytest==9.2.0",
#     "pytest-xdist==3.8.0", "ruff==0.17.5", "safetensors==0.8.0", "sortedcontainers==2.4.0",
#     "typing-extensions==4.16.0",
# ]
# ///

from llmc_jax.base.entrance import enter

if __name__ == "__main__":
    enter()
    from llmc_jax.base.main import program  # here, because it takes packages and a new Python

    program("train")
