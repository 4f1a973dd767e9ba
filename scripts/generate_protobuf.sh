#!/bin/sh
# Makes src/mint/wire/tinker_public_pb2.py from tinker_public.proto, in a throwaway environment.
# The generator is an old one on purpose: generated code may not be newer than the protobuf that is installed, and this
# one's is accepted by every protobuf from 5.28 on.
set -eu
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet 'grpcio-tools==1.66.*'
"$environment/bin/python" -m grpc_tools.protoc -I src --python_out=src --pyi_out=src mint/wire/tinker_public.proto
