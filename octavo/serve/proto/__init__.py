"""The gRPC interface: octavo.proto, and what protoc makes of it. After a change: `make proto`."""
