"""Secure aggregation: the server learns the sum of the sites' updates, and no single one.

The protocol of Bonawitz et al. (2017), with masks between every pair of sites, for one round:

1. ``advertise``: every site makes two ephemeral key pairs and signs them with its site key;
2. ``share``: it splits its two secrets into Shamir shares, encrypted for each of the other sites;
3. ``mask``: it adds its own mask and one mask per other site to its update, and sends that;
4. ``confirm``: it signs the list of sites whose update arrived, and the keys of phase 1 that it was
   sent, once per attempt;
5. ``unmask``: shown the signatures of enough sites on that list, it returns its shares of the own
   masks of sites on it, and of the masking keys of those that dropped out, never both of one site.

Pairwise masks cancel in the sum. :mod:`.masking` is a site's half, free of messages and files;
:mod:`.server` removes the masks that remain; docs/privacy.md has the threat model.
"""
