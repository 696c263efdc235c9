package store

import (
	"bytes"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// Whatever ParseManifest takes has one form only, and names nothing outside
// its directory.
func FuzzParseManifest(f *testing.F) {
	m := describe()
	m.Version, m.ID, m.SandboxID, m.SandboxName, m.Kind = Version, NewID(), NewID(), "c", KindFull
	m.Created = time.Unix(1, 5)
	m.Spec = []byte(`{"b":[1.50,-0,1e3,"\u2028<>"],"a":null}`)
	digest := digestOf(nil)
	m.Files.Archive, m.Files.Tree = Blob{ArchiveName, digest, 1, 2}, Blob{TreeName, digest, 0, 0}
	m.Processes.Images = []Image{{"a.img", digest, 0}, {"b.img", digest, 5}}
	full, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	m.Kind, m.Processes, m.Name, m.Labels, m.Warnings = KindFiles, nil, "n", map[string]string{"z": "1", "a": "ä"}, []string{"w"}
	files, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	for _, data := range [][]byte{full, files} {
		if _, err := ParseManifest(data); err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseManifest(data)
		if err != nil {
			if !isErr(err, fault.ErrCorrupt) && !isErr(err, fault.ErrUnsupported) {
				t.Fatal(err)
			}
			return
		}
		again, err := m.Encode()
		if err != nil || !bytes.Equal(again, data) {
			t.Fatalf("%s\nbecame\n%s (%v)", data, again, err)
		}
		if !isID(m.ID) || m.Files.Archive.Name != ArchiveName || m.Files.Tree.Name != TreeName || m.size(0) < 0 && m.Files.Archive.Bytes < 1<<60 {
			t.Fatalf("%+v", m)
		}
		if m.Processes != nil {
			for _, im := range m.Processes.Images {
				if !isPlain(im.Name) {
					t.Fatal(im.Name)
				}
			}
		}
	})
}
