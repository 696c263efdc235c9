// Package registry moves checkpoints to and from OCI registries.
//
// A checkpoint is an OCI artifact of type ArtifactType. Its config is the
// checkpoint's manifest.json, byte for byte, so what proves a checkpoint at
// rest proves it here as well: the manifest names trees and images by their
// digests, and those name the chunks. Its layers are
//
//	uses              which chunks of the packs belong to this checkpoint
//	pack, index       a file of chunks (see package pack) and the list of them,
//	pack, index       pairwise, any number of times
//
// An index is "abxidx1\n" and then, for each chunk of its pack and in the order
// of their IDs, 32 bytes of ID and 4 bytes (big-endian) of what it takes in the
// pack. Uses is "abxuse1\n" and then, for each pack, a bit per chunk of its
// index (the lowest bit of a byte first), filled up to whole bytes with zeros.
//
// Pushing, the packs of artifacts that are there already are used again, those
// of the parent first of all; what they lack goes into new ones. Artifacts are
// found by a tag made of the checkpoint's id (see Tag). The same chunks
// always make the same packs, so a push that was cut short finds what it left.
// Pulling, a pack is only fetched when the target lacks one of the chunks that
// the checkpoint uses; half a pack in the scratch directory is continued.
//
// Nothing that a registry says is believed: all sizes and counts are bounded,
// every blob is proven against its digest, every chunk against its ID, and
// whether a checkpoint is whole is for the target to find out at its commit.
package registry
