"""The write/read tier: HTTP in, cells out. It keeps no state; what the calls are is in docs/http.md."""
