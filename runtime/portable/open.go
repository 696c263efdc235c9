package portable

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"filippo.io/age/armor"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	maxArchive    = 16 << 40
	maxRatio      = 1000
	freeRatio     = 4 << 30 // bytes that the ratio does not look at
	maxMembers    = 1 << 21
	maxTail       = 1 << 20 // zeros after the end of a tar
	maxMemberName = 4096    // length of a member's name
	windowAtMost  = 128 << 20
)

// Archive is an archive that is being read. It is read once, front to back.
type Archive struct {
	opts    OpenOptions
	src     *source
	out     *bounded
	tar     *tar.Reader
	close   func()
	members int

	manifest *manifest // of an archive of ours
	facts    Facts
	early    []member // of another's, that came before its facts
	header   *tar.Header
}

// member is one that is kept for later.
type member struct {
	name string
	size int64
	dir  bool
	file *os.File
}

// Open reads an archive up to what it says about its checkpoint. The archive is
// to be closed; r is not, and is read to its end by Import alone.
//
// What cannot be an archive is ErrCorrupt, an encrypted one without an identity
// that fits ErrDenied.
func Open(ctx context.Context, r io.Reader, opts OpenOptions) (*Archive, error) {
	a := &Archive{opts: opts, close: func() {}}
	if a.opts.MaxBytes <= 0 {
		a.opts.MaxBytes = maxArchive
	}
	if a.opts.MaxRatio <= 0 {
		a.opts.MaxRatio = maxRatio
	}
	a.src = &source{ctx: ctx, r: r}
	err := a.unpack()
	if err == nil {
		err = a.begin(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("import: %w", err), a.Close())
	}
	return a, nil
}

// Facts returns the archive's facts about its checkpoint.
func (a *Archive) Facts() Facts { return a.facts }

// Close frees what the archive holds. It may be called twice.
func (a *Archive) Close() error {
	a.close()
	a.close = func() {}
	var errs []error
	for _, m := range a.early {
		if m.file != nil {
			errs = append(errs, m.file.Close())
		}
	}
	a.early = nil
	return errors.Join(errs...)
}

// unpack undoes encryption and compression, whatever they are.
func (a *Archive) unpack() error {
	in := bufio.NewReaderSize(a.src, 256<<10)
	head, err := in.Peek(len(armorMagic))
	if len(head) == 0 {
		return a.fail(err)
	}
	if samePrefix(head, armorMagic) || samePrefix(head, ageMagic) {
		var sealed io.Reader = in
		if samePrefix(head, armorMagic) {
			sealed = armor.NewReader(in)
		}
		plain, err := unseal(sealed, a.opts.Identities)
		if err != nil {
			if a.src.err != nil {
				return a.src.err
			}
			return err
		}
		in = bufio.NewReaderSize(plain, 256<<10)
		head, _ = in.Peek(4)
	}
	var data io.Reader
	switch {
	case samePrefix(head, "\x28\xb5\x2f\xfd"):
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(windowAtMost),
			zstd.WithDecoderMaxMemory(windowAtMost))
		if err != nil {
			return err
		}
		data, a.close = z, z.Close
	case samePrefix(head, "\x1f\x8b"):
		z, err := gzip.NewReader(in)
		if err != nil {
			return a.fail(err)
		}
		data = z
	default:
		data = in
	}
	a.out = &bounded{src: a.src, r: data, most: a.opts.MaxBytes, ratio: a.opts.MaxRatio}
	a.tar = tar.NewReader(a.out)
	return nil
}

// fail turns an error of reading into what was the matter: the source, a bound,
// or what the archive is made of.
func (a *Archive) fail(err error) error {
	switch {
	case a.src.err != nil:
		return a.src.err
	case a.out != nil && a.out.bomb != nil:
		return a.out.bomb
	case err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return corrupt("the archive is cut off")
	}
	return corrupt("no archive of a checkpoint, or a damaged one: %v", err)
}

// next goes on to the next member, io.EOF after the last.
func (a *Archive) next() (*tar.Header, error) {
	if h := a.header; h != nil {
		a.header = nil
		return h, nil
	}
	h, err := a.tar.Next()
	if errors.Is(err, io.EOF) && a.src.err == nil && a.out.bomb == nil {
		return nil, io.EOF
	}
	if err != nil {
		return nil, a.fail(err)
	}
	if a.members++; a.members > maxMembers {
		return nil, corrupt("more than %d members", maxMembers)
	}
	return h, checkMember(h)
}

// checkMember refuses all that is no plain file or directory below the archive.
func checkMember(h *tar.Header) error {
	if len(h.Name) > maxMemberName || strings.IndexByte(h.Name, 0) >= 0 {
		return corrupt("a member's name of %d bytes", len(h.Name))
	}
	if path.IsAbs(h.Name) {
		return corrupt("the member %.80q has an absolute name", h.Name)
	}
	for part := range strings.SplitSeq(h.Name, "/") {
		if part == ".." {
			return corrupt("the member %.80q leads out of the archive", h.Name)
		}
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir:
	default:
		return corrupt("the member %.80q is no plain file (type %q)", h.Name, h.Typeflag)
	}
	for key := range h.PAXRecords {
		// The unpacked size of holes would be unbounded.
		if strings.HasPrefix(key, "GNU.sparse.") {
			return corrupt("the member %.80q has holes", h.Name)
		}
	}
	if h.Typeflag == tar.TypeDir && h.Size != 0 {
		return corrupt("the directory %.80q has content", h.Name)
	}
	return nil
}

// read returns all of the current member.
func (a *Archive) read(h *tar.Header, most int64) ([]byte, error) {
	if h.Size > most {
		return nil, corrupt("%s is longer than %d bytes", h.Name, most)
	}
	data, err := io.ReadAll(a.tar)
	if err != nil {
		return nil, a.fail(err)
	}
	return data, nil
}

// end reads what follows the last member: nothing, or zeros. It has the layers
// below prove that nothing is missing.
func (a *Archive) end() error {
	// A tar that ends without its marker is one that was cut.
	if a.out.zeros < 1024 {
		return corrupt("the archive is cut off")
	}
	buf := make([]byte, 64<<10)
	for fill := 0; ; {
		n, err := a.out.Read(buf)
		if fill += n; fill > maxTail || len(bytes.Trim(buf[:n], "\x00")) > 0 {
			return corrupt("something follows the end of the archive")
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return a.fail(err)
		}
	}
}

// source is the caller's reader. It records its errors, which are no fault of the archive's.
type source struct {
	ctx context.Context
	r   io.Reader
	n   int64
	err error
}

func (s *source) Read(p []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	if s.ctx.Err() != nil {
		s.err = context.Cause(s.ctx)
		return 0, s.err
	}
	n, err := s.r.Read(p)
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = fmt.Errorf("read archive: %w", err)
		return n, s.err
	}
	return n, err
}

// bounded keeps what is decompressed within bounds.
type bounded struct {
	src         *source
	r           io.Reader
	n           int64
	most, ratio int64
	zeros       int64 // at the end of what was read
	bomb        error
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.bomb != nil {
		return 0, b.bomb
	}
	n, err := b.r.Read(p)
	b.n += int64(n)
	if b.n > b.most {
		b.bomb = corrupt("the archive unpacks to more than %d bytes", b.most)
	} else if b.n > freeRatio && b.n/b.ratio > b.src.n {
		b.bomb = corrupt("the archive unpacks to more than %d times its size", b.ratio)
	}
	if b.bomb != nil {
		return 0, b.bomb
	}
	last := p[max(0, n-2048):n]
	if z := len(last) - len(bytes.TrimRight(last, "\x00")); z < len(last) {
		b.zeros = int64(z)
	} else {
		b.zeros += int64(z)
	}
	return n, err
}
