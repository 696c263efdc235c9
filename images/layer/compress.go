package layer

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/agentbox/agentbox/internal/fault"
)

// origin remembers whether reading itself failed, to tell that from damage.
type origin struct {
	r   io.Reader
	err error
}

func (s *origin) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// unpacked calls every error of a decompressor damage, unless the source failed.
type unpacked struct {
	r   io.Reader
	src *origin
}

func (u *unpacked) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	switch {
	case err == nil || err == io.EOF:
	case u.src.err != nil:
		err = u.src.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = fmt.Errorf("%w: the archive is cut short", fault.ErrInvalid)
	default:
		err = fmt.Errorf("%w: the archive is damaged: %w", fault.ErrInvalid, err)
	}
	return n, err
}

// Decompress recognises a compression by its first bytes. done frees what was
// needed and reports an error that the stream itself did not.
func Decompress(ctx context.Context, r io.Reader) (plain io.Reader, done func(error) error, err error) {
	src := &origin{r: r}
	br := bufio.NewReaderSize(src, 256<<10)
	magic, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	nothing := func(error) error { return nil }
	starts := func(s string) bool { return bytes.HasPrefix(magic, []byte(s)) }
	switch {
	case starts("\x1f\x8b"):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: the archive is damaged: %w", fault.ErrInvalid, err)
		}
		return &unpacked{z, src}, nothing, nil
	case starts("\x28\xb5\x2f\xfd"):
		// 128 MiB is the window of zstd's --long; a frame could ask for any.
		z, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderConcurrency(2))
		if err != nil {
			return nil, nil, err
		}
		return &unpacked{z, src}, func(error) error { z.Close(); return nil }, nil
	case starts("BZh"):
		return &unpacked{bzip2.NewReader(br), src}, nothing, nil
	case starts("\xfd7zXZ\x00"):
		return unxz(ctx, br)
	}
	return br, nothing, nil
}

// unxz leaves xz to the tool of that name.
func unxz(ctx context.Context, r io.Reader) (io.Reader, func(error) error, error) {
	bin, err := exec.LookPath("xz")
	if err != nil {
		return nil, nil, &fault.Error{Op: "unpack",
			Hint: "Install it (apt-get install xz-utils) or decompress the archive first.",
			Err: fmt.Errorf("%w: the archive is compressed with xz, and the xz command is not there",
				fault.ErrUnsupported)}
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, bin, "-dc", "--memlimit=512MiB")
	cmd.Stdin, cmd.Stderr = r, &stderr
	// Should the source never end, it must not hold the exit up.
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	return out, func(failed error) error {
		if failed != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if msg := strings.TrimSpace(stderr.String()); msg != "" {
				return fmt.Errorf("%w: %s", fault.ErrInvalid, msg)
			}
			return nil
		}
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%w: the archive is damaged: %w: %s", fault.ErrInvalid, err,
				strings.TrimSpace(stderr.String()))
		}
		return nil
	}, nil
}
