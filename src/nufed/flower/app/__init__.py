"""The ServerApp and the ClientApp, which Flower runs at the server and at every site."""
