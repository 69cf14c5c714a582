"""Operations that have a plain torch reference and a Triton kernel; call them through `dispatch`."""
