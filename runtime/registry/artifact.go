package registry

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Media types.
const (
	ArtifactType = "application/vnd.agentbox.checkpoint.v2"
	ManifestType = "application/vnd.agentbox.checkpoint.manifest.v2+json"
	PackType     = "application/vnd.agentbox.pack.v1"
	IndexType    = "application/vnd.agentbox.pack.index.v1"
	UsesType     = "application/vnd.agentbox.pack.uses.v1"
)

// Bounds for what a registry sends. Registries themselves refuse manifests of
// more than 4 MiB; the bound of manifest.json is the store's.
const (
	maxArtifact   = 4 << 20
	maxManifest   = 64 << 20
	maxPack       = 1 << 30
	maxPacks      = 2048
	maxPackChunks = 1 << 20 // in one pack
	maxChunks     = 8 << 20 // in all packs
)

const (
	indexMagic = "abxidx1\n"
	usesMagic  = "abxuse1\n"
	indexEntry = len(pack.ID{}) + 4
)

// artifact is a checkpoint as it is described in a registry.
type artifact struct {
	raw    []byte
	digest v1.Hash
	m      v1.Manifest
	uses   v1.Descriptor
	packs  []packRef
}

// packRef names a pack and its index.
type packRef struct{ pack, index v1.Descriptor }

// chunks returns the number of chunks that its index lists.
func (p packRef) chunks() int { return int(p.index.Size-int64(len(indexMagic))) / indexEntry }

// usesSize returns the length of the uses of these packs.
func usesSize(packs []packRef) int64 {
	n := int64(len(usesMagic))
	for _, p := range packs {
		n += int64(p.chunks()+7) / 8
	}
	return n
}

// encodeArtifact returns the manifest of an artifact. It has one form.
func encodeArtifact(
	config, uses v1.Descriptor, packs []packRef, subject *v1.Descriptor, annotations map[string]string,
) ([]byte, error) {
	layers := []v1.Descriptor{uses}
	for _, p := range packs {
		layers = append(layers, p.pack, p.index)
	}
	raw, err := json.Marshal(v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.OCIManifestSchema1,
		ArtifactType:  ArtifactType,
		Config:        config,
		Layers:        layers,
		Subject:       subject,
		Annotations:   annotations,
	})
	if err == nil && len(raw) > maxArtifact {
		err = fmt.Errorf("the artifact's manifest has %d bytes, %d are allowed: %w", len(raw),
			maxArtifact, fault.ErrUnsupported)
	}
	return raw, err
}

// parseArtifact reads what a registry has under a reference. It returns ErrInvalid for
// anything but a checkpoint, ErrUnsupported for one of another version, and ErrCorrupt for a
// broken one.
func parseArtifact(raw []byte) (*artifact, error) {
	a := &artifact{raw: raw}
	if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&a.m); err != nil {
		return nil, fmt.Errorf("its manifest: %w: %w", fault.ErrCorrupt, err)
	}
	what := a.m.ArtifactType
	if what == "" {
		what = string(a.m.Config.MediaType)
	}
	switch {
	case what == ArtifactType:
	case strings.HasPrefix(what, "application/vnd.agentbox.checkpoint."):
		return nil, &fault.Error{
			Hint: "Use the agentbox that pushed the checkpoint.",
			Err:  fmt.Errorf("it is of type %.80q: %w", what, fault.ErrUnsupported),
		}
	default:
		return nil, fmt.Errorf("it is no checkpoint (%.40q, %.80q): %w", a.m.MediaType, what, fault.ErrInvalid)
	}
	bad := func(format string, args ...any) (*artifact, error) {
		return nil, fmt.Errorf("its manifest: %w: %s", fault.ErrCorrupt, fmt.Sprintf(format, args...))
	}
	if a.m.SchemaVersion != 2 || a.m.MediaType != types.OCIManifestSchema1 {
		return bad("schema %d, media type %.80q", a.m.SchemaVersion, a.m.MediaType)
	}
	layers := a.m.Layers
	if len(layers)%2 != 1 || len(layers) > 1+2*maxPacks {
		return bad("%d layers", len(layers))
	}
	if err := checkBlob(a.m.Config, ManifestType, 2, maxManifest); err != nil {
		return bad("config: %v", err)
	}
	total := 0
	seen := map[v1.Hash]bool{}
	for i, pair := range slices.Collect(slices.Chunk(layers[1:], 2)) {
		p := packRef{pair[0], pair[1]}
		if err := checkBlob(p.pack, PackType, 1, maxPack); err != nil {
			return bad("pack %d: %v", i, err)
		}
		if err := checkBlob(p.index, IndexType, int64(len(indexMagic)+indexEntry),
			int64(len(indexMagic)+maxPackChunks*indexEntry)); err != nil {
			return bad("index %d: %v", i, err)
		}
		if (p.index.Size-int64(len(indexMagic)))%int64(indexEntry) != 0 || seen[p.pack.Digest] {
			return bad("index %d has %d bytes, or its pack is listed twice", i, p.index.Size)
		}
		seen[p.pack.Digest] = true
		if total += p.chunks(); total > maxChunks {
			return bad("more than %d pieces", maxChunks)
		}
		a.packs = append(a.packs, p)
	}
	a.uses = layers[0]
	if want := usesSize(a.packs); checkBlob(a.uses, UsesType, want, want) != nil {
		return bad("uses: %v", checkBlob(a.uses, UsesType, want, want))
	}
	return a, nil
}

func checkBlob(d v1.Descriptor, media types.MediaType, low, high int64) error {
	switch {
	case d.MediaType != media:
		return fmt.Errorf("media type %.80q in place of %q", d.MediaType, media)
	case d.Digest.Algorithm != "sha256" || len(d.Digest.Hex) != 64:
		return fmt.Errorf("digest %.80q", d.Digest.String())
	case d.Size < low || d.Size > high:
		return fmt.Errorf("%d bytes, %d to %d are possible", d.Size, low, high)
	case len(d.URLs) > 0:
		return fmt.Errorf("it lies elsewhere (%.80q)", d.URLs[0])
	}
	return nil
}

// entry is a chunk in a pack's index.
type entry struct {
	id     pack.ID
	stored uint32
}

func (e entry) compare(o entry) int { return bytes.Compare(e.id[:], o.id[:]) }

// encodeIndex takes sorted entries.
func encodeIndex(entries []entry) []byte {
	b := make([]byte, 0, len(indexMagic)+len(entries)*indexEntry)
	b = append(b, indexMagic...)
	for _, e := range entries {
		b = binary.BigEndian.AppendUint32(append(b, e.id[:]...), e.stored)
	}
	return b
}

// parseIndex reads the index of a pack of packed bytes.
func parseIndex(b []byte, packed int64) ([]entry, error) {
	rest, ok := bytes.CutPrefix(b, []byte(indexMagic))
	if !ok || len(rest) == 0 || len(rest)%indexEntry != 0 {
		return nil, fmt.Errorf("index of a pack: %w: %d bytes", fault.ErrCorrupt, len(b))
	}
	list := make([]entry, 0, len(rest)/indexEntry)
	sum := int64(0)
	for rec := range slices.Chunk(rest, indexEntry) {
		e := entry{pack.ID(rec[:len(pack.ID{})]), binary.BigEndian.Uint32(rec[len(pack.ID{}):])}
		if n := len(list); n > 0 && list[n-1].compare(e) >= 0 {
			return nil, fmt.Errorf("index of a pack: %w: entry %d is not in its place", fault.ErrCorrupt, n)
		}
		if sum += int64(e.stored); e.stored == 0 || sum > packed {
			return nil, fmt.Errorf("index of a pack: %w: entry %d has %d bytes", fault.ErrCorrupt, len(list), e.stored)
		}
		list = append(list, e)
	}
	return list, nil
}

// bitmap has a bit for each entry of an index.
type bitmap []byte

func (m bitmap) has(i int) bool { return m[i/8]&(1<<(i%8)) != 0 }
func (m bitmap) set(i int)      { m[i/8] |= 1 << (i % 8) }

func newBitmap(n int) bitmap { return make(bitmap, (n+7)/8) }

func encodeUses(maps []bitmap) []byte {
	return append([]byte(usesMagic), slices.Concat(maps...)...)
}

func parseUses(b []byte, packs []packRef) ([]bitmap, error) {
	rest, ok := bytes.CutPrefix(b, []byte(usesMagic))
	if !ok || int64(len(b)) != usesSize(packs) {
		return nil, fmt.Errorf("uses of packs: %w: %d bytes", fault.ErrCorrupt, len(b))
	}
	maps := make([]bitmap, len(packs))
	for i, p := range packs {
		n := p.chunks()
		size := (n + 7) / 8
		maps[i], rest = bitmap(rest[:size:size]), rest[size:]
		if n%8 != 0 && maps[i][size-1]>>(n%8) != 0 {
			return nil, fmt.Errorf("uses of packs: %w: pieces that pack %d does not have", fault.ErrCorrupt, i)
		}
	}
	return maps, nil
}
