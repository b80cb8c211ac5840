"""The gRPC interface: octavo.proto, and what protoc makes of it. After a change, in the root of the repository:

python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. octavo/serve/proto/octavo.proto
"""
