// Package pack holds chunks of data at rest: packs, which are files of many
// chunks, and the rules by which data is cut into chunks.
//
// A chunk is 1 to MaxChunk bytes, named by its ID, the BLAKE3 hash of its raw
// bytes. A pack is written once, by a Writer or a Serial, and never changed
// again. All numbers are little-endian; this is every byte of it:
//
//	offset          bytes  what
//	0               8      "agbxpk1\n"
//	8               ...    the stored chunks, one after the other, no gaps
//	f               41*n   the footer: one record per chunk, in the order of
//	                       the chunks
//	                32       ID
//	                4        stored: bytes that the chunk takes in the pack
//	                4        raw: bytes that it has
//	                1        0: stored as it is (stored = raw)
//	                         1: a zstd frame without checksum, then the
//	                            CRC-32C of the frame, 4 bytes (stored < raw)
//	f+41*n          8      n, at least 1
//	f+41*n+8        32     BLAKE3 of the 41*n+8 bytes before it
//	f+41*n+40       8      "agbxend\n"
//
// The lengths alone say where each chunk lies, so chunks can neither overlap
// nor lie outside, and the file ends exactly there. The hash in the end is the
// name of the pack (64 hex digits). It proves the footer, and the footer's IDs
// prove the chunks; the CRC is for those bits of a zstd frame that mean
// nothing. So no byte of a pack can change without Open or Read finding it. A
// Writer compresses in parallel, so the order of chunks, and with it the name,
// is not determined by what is in it; that of a Serial is.
//
// # Cutting
//
// How data is cut is as much part of the format as the above: two versions of
// agentbox that cut otherwise would not share chunks. Cut cuts by content.
// CutPages is for the memory of processes, where data keeps its place in a
// page but pages come and go: it looks up every page among those of an earlier
// image, and lays the new ones into chunks of 16. An image is then described by a
// recipe, a list of Segments:
//
//	bytes  what
//	1      1 (the version)
//	v      p, how many different chunks there are
//	32*p   their IDs, in the order of their first use
//	v      s, how many segments there are
//	       and for each of them
//	v        the chunk: its number, less that of the segment before (the first: less 0), zigzag
//	v        where in the raw chunk it begins
//	v        its bytes, at least 1
//
// v is an unsigned varint of encoding/binary in its shortest form. To find the
// pages again, a table says what is in the chunks that CutPages made:
//
//	bytes  what
//	       for each chunk
//	32       ID
//	1        n, its pages: 1 to 16
//	16*n     the first 16 bytes of the BLAKE3 of each
//
// A table may hold chunks that an image does not use; LoadPageIndex passes over
// them. So the table of an image is that of the image before it with a new part
// at its end, and costs what changed.
package pack
