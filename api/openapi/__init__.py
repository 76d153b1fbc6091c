"""What the API says of itself: /openapi.json, made from the route table, and the page /docs over it."""
