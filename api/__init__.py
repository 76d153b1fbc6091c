"""The write/read tier: HTTP in, cells out. It keeps no state. docs/http.md lists its routes."""
